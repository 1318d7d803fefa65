"""Holder of a run directory: its lock, the note of an allocation, and the folder itself."""

import fcntl
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir import files
from areal_hpc.rundir.files import RunDirWatch, forbid_making, make_folder, write_atomic
from areal_hpc.rundir.lock import (
    LAUNCHER_HEARTBEAT_TIMEOUT_S,
    AllocationNote,
    check_no_live_launcher,
    claim,
    claim_submission,
    find_live_launcher_note,
    hold_lock,
    is_lock_held,
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
    lines = list[str]()
    check_no_live_launcher(paths, lines.append, watch_s=0.1)
    assert lines == ["waiting  a launcher in allocation 12 was here within the last minute"]


def test_a_note_that_is_old_or_torn_tells_of_nobody(paths: RunPaths) -> None:
    write_allocation_note(paths, AllocationNote("12", 7))
    before = time.time() - 2 * LAUNCHER_HEARTBEAT_TIMEOUT_S
    os.utime(paths.allocation_note, (before, before))
    assert find_live_launcher_note(paths) is None
    paths.allocation_note.write_text("{")
    assert find_live_launcher_note(paths) is None


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_mark_by_run_dir", {})
    made = tmp_path / "experiment" / "trial"
    make_folder(made)
    (made / "recipe.yaml").touch()
    forbid_making(made)
    return made


def test_what_is_written_below_a_run_that_was_moved_is_refused(run_dir: Path) -> None:
    write_atomic(run_dir / "jobs" / "trainer" / "exit.json", b"{}")
    run_dir.rename(run_dir.with_name("elsewhere"))
    for name in ("events.json", "jobs/trainer/exit.json"):
        with pytest.raises(FileNotFoundError, match="trial"):
            write_atomic(run_dir / name, b"{}")
    assert not run_dir.exists()
    run_dir.mkdir()  # half of it is there, as while it is moved to another file system
    with pytest.raises(FileNotFoundError, match="trial"):
        write_atomic(run_dir / "jobs" / "trainer" / "exit.json", b"{}")
    write_atomic(run_dir.with_name("another") / "recipe.yaml", b"")


def test_a_folder_missing_three_times_while_its_parent_answers_is_gone(run_dir: Path) -> None:
    watch, elsewhere = RunDirWatch(run_dir), run_dir.with_name("elsewhere")
    assert not watch.is_gone()
    run_dir.rename(elsewhere)
    assert [watch.is_gone(), watch.is_gone()] == [False, False]
    elsewhere.rename(run_dir)
    assert not watch.is_gone()
    run_dir.rename(elsewhere)
    assert [watch.is_gone() for _ in range(3)] == [False, False, True]
    assert RunDirWatch(run_dir).is_gone(looks=1)
    run_dir.parent.rename(run_dir.parent.with_name("unmounted"))
    with pytest.raises(FileNotFoundError):
        watch.is_gone()


def test_a_look_at_the_lock_keeps_no_launcher_from_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    looking = lock.open()
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_lock_held` does for a moment
    threading.Timer(0.1, looking.close).start()
    with hold_lock(lock):
        assert is_lock_held(lock)
    assert not is_lock_held(lock)


def test_a_claim_keeps_launchers_on_other_hosts_and_caretakers_out(tmp_path: Path) -> None:
    path = tmp_path / "submission.claim"
    with claim_submission(path):
        with claim(path, "a caretaker") as claimant:
            assert socket.gethostname() in claimant
        assert path.exists()
    assert not path.exists()
    path.write_text("a launcher on login2 (0123)\nabc")
    with pytest.raises(ClusterError, match="launcher on login2"), claim_submission(path):
        pass
    assert path.exists()


def test_of_many_claims_at_once_one_is_given(tmp_path: Path) -> None:
    path, given = tmp_path / "claim", []
    all_begin = threading.Barrier(8)

    def take(number: int) -> None:
        all_begin.wait()
        with claim(path, f"process {number}") as claimant:
            if not claimant:
                given.append(number)
                all_seen.wait()
            else:
                all_seen.wait()

    for left_behind in (False, True):
        all_seen = threading.Barrier(8)
        if left_behind:
            path.write_text("process of long ago")
            os.utime(path, (1.0, 1.0))
        threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(given) == 1
        given.clear()
        assert list(tmp_path.iterdir()) == []


def test_a_claim_that_took_too_long_is_not_removed_for_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    with claim(path, "slow"):
        os.utime(path, (1.0, 1.0))
        with claim(path, "quick") as claimant:
            assert claimant == ""
            assert path.read_text().startswith("quick")
    assert not path.exists()


@pytest.mark.parametrize("left_by", ["this host", "another, long ago"])
def test_a_claim_of_a_launcher_that_was_killed_is_taken(tmp_path: Path, left_by: str) -> None:
    path = tmp_path / "submission.claim"
    with claim_submission(path):
        content = path.read_text()
    path.write_text(content if left_by == "this host" else "a launcher on login2 (01)\nab")
    if left_by != "this host":
        os.utime(path, (1.0, 1.0))
    with claim_submission(path):
        assert socket.gethostname() in path.read_text()
    assert not path.exists()
