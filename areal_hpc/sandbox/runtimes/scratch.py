"""Folder that a runtime covers with a file system in memory, in a mount namespace of its own."""

from collections.abc import Sequence
from pathlib import Path

from areal_hpc.errors import ClusterError

_CANDIDATES = ("/media", "/srv", "/mnt", "/opt")
"""Folders that every distribution has (FHS 3.0); what covers one is seen by the runtime alone."""


def choose_scratch_mount_point(used_paths: Sequence[str]) -> str:
    """A folder that may be covered: nothing that the sandbox is made of lies in it."""
    for place in _CANDIDATES:
        if Path(place).is_dir() and not any(Path(one).is_relative_to(place) for one in used_paths):
            return place
    raise ClusterError(
        f"none of {', '.join(_CANDIDATES)} can hold the files of a sandbox on this machine",
        hint="move the root file system out of them",
    )
