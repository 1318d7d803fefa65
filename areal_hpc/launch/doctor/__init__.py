"""Checks of a cluster before a run (`areal-hpc doctor`). `registry.py` lists them."""
