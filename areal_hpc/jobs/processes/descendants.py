"""Processes that a process started, also those that have left its session: found, and killed."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Set
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_spared_pids: set[int] = set()


def become_child_subreaper() -> None:
    """Make this process the parent of those of its descendants that lose theirs (prctl(2)).

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def list_descendants(pid: int, left_out: Set[int] = frozenset()) -> list[int]:
    """The processes below one, the nearest first. Costs a file read for each of its threads.

    Those of `left_out` are not among them, nor what is below them.
    """
    found, looked_at = [pid], 0
    while looked_at < len(found):  # no recursion: a program may start any number within another
        for task in _list_thread_dirs(found[looked_at]):
            with contextlib.suppress(OSError):  # it ended meanwhile
                children = map(int, (task / "children").read_text().split())
                found += [child for child in children if child not in left_out]
        looked_at += 1
    return found[1:]


def read_resident_bytes(pid: int) -> int:
    """Memory that a process holds, shared pages included; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def spare_from_kill(pid: int) -> None:
    """Spare a child of this process, and all below it, in `kill_descendants`.

    It serves more than one call.
    """
    _spared_pids.add(pid)


def stop_sparing_from_kill(pid: int) -> None:
    _spared_pids.discard(pid)


def kill_descendants(pid: int, spared_pids: frozenset[int] = frozenset()) -> None:
    while left := [one for one in list_descendants(pid, _spared_pids) if one not in spared_pids]:
        for one in left:
            kill_and_reap_process(one)


def kill_and_reap_process(pid: int) -> None:
    """Kill a process, and wait for it if it is a child. It may have ended."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # it is no child
        os.waitpid(pid, 0)


def _list_thread_dirs(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
