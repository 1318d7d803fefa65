"""LAUNCH: Slurm jobs, their processes, addresses, epochs and signals. Knows nothing about RL."""
