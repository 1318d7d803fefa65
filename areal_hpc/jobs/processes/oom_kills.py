"""Kills by the kernel's out-of-memory killer: what it ended is no fault of its program."""

import contextlib
import signal
from pathlib import Path

_VMSTAT_PATH = Path("/proc/vmstat")
_COUNTER = b"oom_kill "
"""Of all control groups; the kernel counts before it kills."""


class OomKillWatch:
    """Watch for kills for want of memory on this machine, from its construction on."""

    def __init__(self) -> None:
        self._before = count_oom_kills()

    def has_any(self) -> bool:
        """True once there was one: of whatever process, so look at how that in question ended."""
        return count_oom_kills() > self._before

    def has_killed(self, exit_code: int | None) -> bool:
        """True if there was one, and this is the exit code of a process that SIGKILL ended."""
        return exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) and self.has_any()


def count_oom_kills() -> int:
    """Processes killed for want of memory since this machine started; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in _VMSTAT_PATH.read_bytes().splitlines():
            if line.startswith(_COUNTER):
                return int(line.removeprefix(_COUNTER))
    return 0
