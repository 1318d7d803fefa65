"""Slurm: asking it and telling it; submission, scripts, job states, pending reasons."""
