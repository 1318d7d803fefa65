"""Ties between processes: death with the parent, and the descendants of a process.

The kernel's parent death signal survives `exec`, so this module can wrap any command.
(subprocess's `preexec_fn` would run Python after `fork` in a process with threads.)
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path

_PR_SET_PDEATHSIG = 1
ORPHAN_GRACE_S = 10.0
"""Time for a process to stop by itself after its supervisor vanished."""


def die_with_parent(signal_number: int) -> None:
    """Make the kernel send `signal_number` to this process when its parent dies.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def exit_when_orphaned(parent: int) -> None:
    """End a process that ignores its parent death signal."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(75)


def main() -> None:
    """Replace this process by the command, or exit at once if the parent is already gone."""
    parent, *argv = sys.argv[1:]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(75)
    os.execvp(argv[0], argv)


_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_spared_pids: set[int] = set()


def become_child_subreaper() -> None:
    """Make this process the parent of its orphaned descendants (prctl(2)).

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def list_descendants(pid: int, left_out: Set[int] = frozenset()) -> list[int]:
    """List the descendants of a process, the nearest first, without `left_out` and those below.

    Reads a file for each of their threads.
    """
    pids, visited = [pid], 0
    while visited < len(pids):  # no recursion, as a program may nest processes without limit
        for task in _list_thread_dirs(pids[visited]):
            with contextlib.suppress(OSError):  # it ended meanwhile
                children = map(int, (task / "children").read_text().split())
                pids += [child for child in children if child not in left_out]
        visited += 1
    return pids[1:]


def read_resident_bytes(pid: int) -> int:
    """Return the memory of a process, shared pages included; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def spare_from_kill(pid: int) -> None:
    """Make `kill_descendants` spare a child, and all below it, that serves more than one call."""
    _spared_pids.add(pid)


def stop_sparing_from_kill(pid: int) -> None:
    _spared_pids.discard(pid)


def kill_descendants(pid: int, spared_pids: frozenset[int] = frozenset()) -> None:
    while left := [
        child for child in list_descendants(pid, _spared_pids) if child not in spared_pids
    ]:
        for child in left:
            end_process(child)


def end_process(pid: int) -> None:
    """Kill a process that may have ended, and wait for it if it is a child."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # not a child
        os.waitpid(pid, 0)


def _list_thread_dirs(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


if __name__ == "__main__":
    main()
