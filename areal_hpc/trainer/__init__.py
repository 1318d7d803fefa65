"""Trainer: Megatron-core ranks that learn from sealed shards."""
