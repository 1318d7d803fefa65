"""Private parts of Megatron-core and PyTorch that the trainer relies on."""
