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
    claim_submission_or_raise,
    hold_lock_or_raise,
    is_claimed,
    is_lock_held,
)


def test_a_look_at_the_lock_keeps_no_launcher_from_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    looking = lock.open()
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_lock_held` does for a moment
    threading.Timer(0.1, looking.close).start()
    with hold_lock_or_raise(lock):
        assert is_lock_held(lock)
    assert not is_lock_held(lock)


def test_a_second_launcher_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        hold_lock_or_raise(lock),
        pytest.raises(ClusterError, match="another process is running"),
        hold_lock_or_raise(lock),
    ):
        pass
    with hold_lock_or_raise(lock):
        pass


def test_a_claim_keeps_launchers_on_other_hosts_out(tmp_path: Path) -> None:
    path = tmp_path / "submission.claim"
    with claim_submission_or_raise(path):
        with claim(path) as host:
            assert host == socket.gethostname()
        assert path.exists()
    assert not path.exists()
    path.write_text("login2")
    with pytest.raises(ClusterError, match="launcher on login2"), claim_submission_or_raise(path):
        pass
    assert path.read_text() == "login2"


@pytest.mark.parametrize("left_by", ["this host", "another, long ago"])
def test_a_claim_of_a_launcher_that_was_killed_is_taken(tmp_path: Path, left_by: str) -> None:
    path = tmp_path / "submission.claim"
    path.write_text(socket.gethostname() if left_by == "this host" else "login2")
    if left_by != "this host":
        os.utime(path, (1.0, 1.0))
    with claim_submission_or_raise(path):
        assert is_claimed(path)
    assert not path.exists()
