"""Replacements for Megatron's CUDA calls on a machine without a GPU."""
