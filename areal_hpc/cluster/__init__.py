"""LAUNCH: Slurm jobs, their processes, addresses and signals. Knows nothing about RL."""
