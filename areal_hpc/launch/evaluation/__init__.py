"""`areal-hpc eval`: evaluation sets played on a model or a checkpoint, without a trainer."""
