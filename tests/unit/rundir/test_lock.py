"""The launcher's lock is held once, and a look at it keeps nobody from it."""

import fcntl
import threading
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.lock import hold_lock_or_raise, is_lock_held


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
