"""What Megatron Core says about a checkpoint: the structure of its model, asked of Megatron in a process of its own."""
