"""Stand-ins for a machine without a GPU: Megatron's CUDA calls, and attention."""
