"""A process that ends when its parent dies, also as a command wrapper.

The request for the kernel's death signal survives `exec`, so the command needs to know
nothing of it. (subprocess's `preexec_fn` would run Python after `fork` in a process with threads.)
"""

import ctypes
import os
import signal
import sys
import time

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


def wait_until_orphaned_and_exit(parent: int) -> None:
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


if __name__ == "__main__":
    main()
