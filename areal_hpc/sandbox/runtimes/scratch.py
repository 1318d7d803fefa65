"""Folder that a runtime covers with a file system in memory, in a mount namespace of its own."""

from collections.abc import Sequence
from pathlib import Path

from areal_hpc.errors import ClusterError

_CANDIDATES = ("/media", "/srv", "/mnt", "/opt")
"""Folders that every distribution has (FHS 3.0); what covers one is seen by the runtime alone."""

LIMIT_KERNEL_OBJECTS_SCRIPT = """
for limit in inotify_instances=64 inotify_watches=16384 fanotify_groups=16 fanotify_marks=1024; do
  { echo "${limit#*=}" > "/proc/sys/user/max_${limit%=*}"; } 2> /dev/null || :
done
"""
"""What a user namespace may have of what its user has few of elsewhere, too."""


def choose_scratch_mount_point(used_paths: Sequence[str]) -> str:
    """A folder that may be covered: nothing that the sandbox is made of lies in it."""
    for place in _CANDIDATES:
        if Path(place).is_dir() and not any(Path(one).is_relative_to(place) for one in used_paths):
            return place
    raise ClusterError(
        f"none of {', '.join(_CANDIDATES)} can hold the files of a sandbox on this machine",
        hint="move the root file system out of them",
    )
