"""Node-local journal and sealed HDF5 shards, in which recorded trajectories reach the trainer."""
