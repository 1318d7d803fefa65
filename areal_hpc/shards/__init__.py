"""Journal and sealed HDF5 shards, format v1. Knows tokens, not their meaning."""
