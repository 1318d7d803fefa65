"""Trainer: Megatron-core ranks that train on sealed shards. Read `loop.py` first."""
