"""Note of a launcher in an allocation: where its steps run. Written often: it is its heartbeat."""

import time
from collections.abc import Callable

import msgspec
from msgspec import Struct, field

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.paths import RunPaths

HEARTBEAT_PERIOD_S = 5.0
LAUNCHER_HEARTBEAT_TIMEOUT_S = 60.0
"""A launcher that was silent for so long is gone: its steps stop."""


class StepNote(Struct, frozen=True):
    """Step of one job."""

    job: str
    step: str
    """Its name in Slurm."""
    nodes: tuple[str, ...]


class AllocationNote(Struct, frozen=True):
    """State of a launcher and its steps."""

    job_id: str
    """The allocation's."""
    beat: int
    """How often the launcher has written it."""
    steps: list[StepNote] = field(default_factory=list)
    """Those that run."""


def write_allocation_note(paths: RunPaths, note: AllocationNote) -> None:
    write_atomic(paths.allocation_note, msgspec.json.encode(note))


def find_live_launcher_note(paths: RunPaths) -> AllocationNote | None:
    """The note of a launcher that is alive, or was a moment ago; None if there is none."""
    try:
        if time.time() - paths.allocation_note.stat().st_mtime > LAUNCHER_HEARTBEAT_TIMEOUT_S:
            return None
        return msgspec.json.decode(paths.allocation_note.read_bytes(), type=AllocationNote)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def wait_and_raise_if_launcher_is_alive(
    paths: RunPaths, print_line: Callable[[str], None], watch_s: float = 2.5 * HEARTBEAT_PERIOD_S
) -> None:
    """Make sure that no launcher in an allocation works in a run directory.

    The lock says so as well, where the file system has locks that reach other nodes. A note that
    is fresh, as one whose launcher was killed leaves it, is watched for a while.

    Raises:
        ClusterError: One does.
    """
    if (first := find_live_launcher_note(paths)) is None:
        return
    print_line(f"waiting  a launcher in allocation {first.job_id} was here within the last minute")
    give_up_at = time.monotonic() + watch_s
    while time.monotonic() < give_up_at:
        time.sleep(min(watch_s / 10, 1.0))
        note = find_live_launcher_note(paths)
        if note is not None and note != first:
            raise ClusterError(
                f"a launcher in allocation {note.job_id} is running this recipe",
                key=str(paths.root),
                hint=f"wait for its end, or end the allocation: scancel {note.job_id}",
            )
