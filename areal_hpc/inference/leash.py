"""`python -m areal_hpc.inference.leash PARENT ARGV...`: run a command that dies with its parent.

The request for the kernel's death signal survives `exec`, so the command needs to know
nothing of it. (subprocess's `preexec_fn` would run Python after `fork` in a process with threads.)
"""

from __future__ import annotations

import os
import signal
import sys

from areal_hpc.cluster.entry import die_with_parent


def main() -> None:
    """Become the command, or exit at once when the parent is already gone."""
    parent, *argv = sys.argv[1:]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(75)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
