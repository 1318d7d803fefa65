"""The `areal-hpc` command line."""
