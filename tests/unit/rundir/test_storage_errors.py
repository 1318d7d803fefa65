"""Errors of shared storage, and for how long they are passed over."""

import errno
from collections.abc import Callable

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.files import StorageErrorTolerance

LIMIT_S = 60.0


class Storage:
    """Answers with an error or not, at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.tolerance = StorageErrorTolerance(LIMIT_S, read_s=lambda: self.now_s)

    def look(self, error: OSError | None = None, after_s: float = 0.0) -> bool:
        """True if the look succeeded."""
        self.now_s += after_s
        succeeded = False
        with self.tolerance.tolerate():
            if error is not None:
                raise error
            succeeded = True
        return succeeded


@pytest.fixture
def storage() -> Storage:
    return Storage()


def stale() -> OSError:
    return OSError(errno.ESTALE, "Stale file handle", "/run/events.jsonl")


def test_an_error_now_and_then_is_passed_over_for_ever(storage: Storage) -> None:
    for _ in range(10):
        assert not storage.look(stale(), after_s=LIMIT_S)
        assert storage.look()


def test_an_error_after_a_long_hang_is_the_first_one(storage: Storage) -> None:
    assert storage.look()
    assert not storage.look(stale(), after_s=10 * LIMIT_S)


def test_storage_that_only_fails_is_lost_after_a_while(storage: Storage) -> None:
    assert not storage.look(stale())
    assert not storage.look(stale(), after_s=LIMIT_S)
    with pytest.raises(ClusterError, match=r"for 60 s.*Stale") as lost:
        storage.look(stale(), after_s=1.0)
    assert lost.value.problems[0].key == "/run/events.jsonl"


@pytest.mark.parametrize("make_error", [BrokenPipeError, lambda: ValueError("no error of storage")])
def test_other_errors_are_not_passed_over(
    storage: Storage, make_error: Callable[[], Exception]
) -> None:
    with pytest.raises((BrokenPipeError, ValueError)), storage.tolerance.tolerate():
        raise make_error()
