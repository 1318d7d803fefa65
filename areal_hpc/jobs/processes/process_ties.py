"""Ties of processes: one that ends when its parent dies, and those that a process started.

The request for the kernel's death signal survives `exec`, so that this module is a command's
wrapper and the command needs to know nothing of it. (subprocess's `preexec_fn` would run Python
after `fork` in a process with threads.)
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
"""Time a process may take to stop by itself after its supervisor vanished."""


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel to send `signal_number` to this process when its parent dies.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def exit_when_orphaned(parent: int) -> None:
    """The last resort behind the death signal: a process that ignores it still ends."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(75)


def main() -> None:
    """Become the command, or exit at once when the parent is already gone."""
    parent, *argv = sys.argv[1:]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(75)
    os.execvp(argv[0], argv)


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
            end_process(one)


def end_process(pid: int) -> None:
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


if __name__ == "__main__":
    main()
