"""Task sets: where rows come from, and their form as tasks. `get_custom_dataset` is AReaL's."""

from areal_hpc.dataset.custom import get_custom_dataset

__all__ = ["get_custom_dataset"]
