"""What tests of checkpoints need, ours and other people's: real tiny checkpoints, and Megatron on a CPU.

Importing this package imports nothing else; the modules in it are imported by name.
"""
