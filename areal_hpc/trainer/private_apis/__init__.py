"""Private APIs of Megatron-core and PyTorch that the trainer uses, one module for each."""
