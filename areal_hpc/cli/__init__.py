"""`areal-hpc`: the command line, one module per family of commands."""
