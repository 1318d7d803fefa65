"""TRAIN: Megatron-core ranks turn sealed shards into better weights."""
