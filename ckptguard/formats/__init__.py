"""What is on disk: one module per format, detection by validation, no pickle that runs code.

``open_checkpoint(path)`` in ``ckptguard.formats.registry`` is the way in.
"""
