"""Kills by the kernel's out-of-memory killer, counted for the whole machine."""

import contextlib
import signal
from pathlib import Path

_VMSTAT_PATH = Path("/proc/vmstat")
_COUNTER = b"oom_kill "
"""Of all control groups; the kernel counts before it kills."""


class OomKillWatch:
    """Watch for out-of-memory kills on this machine, from its construction on."""

    def __init__(self) -> None:
        self._before = count_oom_kills_since_boot()

    def may_have_killed(self, exit_code: int | None) -> bool:
        """True if a child with this `Popen.returncode` died by SIGKILL and there was such a kill.

        It may have been another process's: the kernel counts them all together.
        """
        return exit_code == -signal.SIGKILL and count_oom_kills_since_boot() > self._before


def count_oom_kills_since_boot() -> int:
    """Out-of-memory kills since this machine started; 0 where the kernel does not count them."""
    with contextlib.suppress(OSError, ValueError):
        for line in _VMSTAT_PATH.read_bytes().splitlines():
            if line.startswith(_COUNTER):
                return int(line.removeprefix(_COUNTER))
    return 0
