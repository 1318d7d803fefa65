"""Whether a launcher in an allocation still works in a run directory."""

import os
import threading
import time
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.lock import (
    LAUNCHER_HEARTBEAT_TIMEOUT_S,
    AllocationNote,
    check_no_live_launcher,
    find_live_launcher_note,
    write_allocation_note,
)
from areal_hpc.rundir.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path)
    paths.jobs_dir.mkdir()
    return paths


def test_a_launcher_that_beats_is_not_joined_by_another(paths: RunPaths) -> None:
    write_allocation_note(paths, AllocationNote("12", 1))
    is_over = threading.Event()

    def beat() -> None:
        number = 1
        while not is_over.wait(0.02):
            number += 1
            write_allocation_note(paths, AllocationNote("12", number))

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(ClusterError, match="allocation 12 is running this recipe"):
            check_no_live_launcher(paths, print, watch_s=30.0)
    finally:
        is_over.set()
        heart.join()


def test_one_that_was_killed_is_succeeded_once_it_was_watched(paths: RunPaths) -> None:
    write_allocation_note(paths, AllocationNote("12", 7))
    said = list[str]()
    check_no_live_launcher(paths, said.append, watch_s=0.1)
    assert said == ["waiting  a launcher in allocation 12 was here within the last minute"]


def test_a_note_that_is_old_or_torn_tells_of_nobody(paths: RunPaths) -> None:
    write_allocation_note(paths, AllocationNote("12", 7))
    before = time.time() - 2 * LAUNCHER_HEARTBEAT_TIMEOUT_S
    os.utime(paths.allocation_note, (before, before))
    assert find_live_launcher_note(paths) is None
    paths.allocation_note.write_text("{")
    assert find_live_launcher_note(paths) is None
