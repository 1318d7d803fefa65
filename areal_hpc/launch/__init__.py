"""Recipe -> jobs: planned, put in place, then started here or queued on Slurm."""
