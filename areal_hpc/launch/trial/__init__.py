"""Trial episodes of `areal-hpc try`: the real proxy and driver before a stand-in engine."""
