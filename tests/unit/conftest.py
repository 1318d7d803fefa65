"""A busy machine is slow, not wrong: examples have no deadline."""

from hypothesis import settings

settings.register_profile("areal_hpc", deadline=None)
settings.load_profile("areal_hpc")
