"""Command line `areal-hpc`."""
