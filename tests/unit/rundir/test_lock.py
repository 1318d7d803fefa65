"""The launcher's lock is held once, and a look at it keeps nobody from it."""

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.lock import (
    claim,
    claim_submission,
    hold_lock,
    is_lock_held,
)


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
