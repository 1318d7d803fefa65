"""A real multi-node Slurm on one machine for development and tests."""
