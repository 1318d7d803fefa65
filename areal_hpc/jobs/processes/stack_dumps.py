"""Stacks of processes on request, for a role that hangs: `areal-hpc stacks`.

A signal makes a process write the stack of each of its threads to its log. The handler is
faulthandler's, in C, so it answers while Python waits in a collective or a driver, and no right to
trace processes is needed. A supervisor signals its processes when the run's user asks for it by a
file in the job's folder.
"""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

_SIGNAL = signal.SIGUSR1
_LOOK_INTERVAL_S = 2.0
_PAUSE_S = 0.05
"""Time for a process to write before the next one, which may have the same log."""


def answer_stack_requests() -> None:
    """Install the handler in this process."""
    faulthandler.register(_SIGNAL)


class StackRequestWatch:
    """Watch of a job's file of requests; one from before the first look is old."""

    def __init__(self, request: Path) -> None:
        self._request = request
        self._newest: bytes | None = None
        self._next_look_at = 0.0

    def has_new_request(self) -> bool:
        """Look at the file every two seconds at most, as it lies on shared storage."""
        now = time.monotonic()
        if now < self._next_look_at:
            return False
        self._next_look_at = now + _LOOK_INTERVAL_S
        newest = b""
        with suppress(FileNotFoundError):
            newest = self._request.read_bytes()
        is_new = self._newest not in (None, newest)
        self._newest = newest
        return is_new


def request_stacks(pid: int, *, with_descendants: bool) -> None:
    """Ask a process for its stacks; pass over processes that have no handler, which would die."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for asked in (process, *(process.children(recursive=True) if with_descendants else ())):
            with suppress(FileNotFoundError, ProcessLookupError):
                if _catches_signal(asked.pid):
                    os.kill(asked.pid, _SIGNAL)
                    time.sleep(_PAUSE_S)


def _catches_signal(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (_SIGNAL - 1) & 1)
    return False
