"""Set-up of a process of a job as it starts: its log, its limit of open files, its stop signals.

Light to import: every process pays for it.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from areal_hpc.errors import escape_controls

PROMETHEUS_VARIABLE = "AREAL_HPC_PROMETHEUS"
"""Set to 1 in the processes of a run with `cluster.prometheus`."""


def raise_open_file_limit() -> None:
    """Raise this process's limit to what its administrator allows.

    Logins and Slurm often give 1,024, kept low for programs that use select(2). The ledger holds
    two connections for each cell, a proxy one for each call that its agents have under way.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class EscapingFormatter(logging.Formatter):
    """Formatter of records that may quote a model: whoever prints a log obeys no such text."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def set_up_logging(level: int = logging.INFO) -> None:
    """One line per record on standard error, which the supervisor redirects to the role's log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """Set by the first stop signal. Heard even while the main thread sits in a C call.

    Python runs signal handlers only between bytecodes of the main thread, so a rank that waits
    inside a collective would never notice. The wake-up descriptor is written by the C handler
    at once and read by a watcher thread.
    """

    def __init__(self) -> None:
        self._event = threading.Event()

    @classmethod
    def install(cls) -> StopRequest:
        """Replace the process's stop-signal handlers. Call from the main thread."""
        request = cls()
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: _notify_watcher(writer, number))
        threading.Thread(
            target=request._watch_signals, args=(reader, writer), name="stop-watcher", daemon=True
        ).start()
        return request

    def _watch_signals(self, reader: socket.socket, writer: socket.socket) -> None:
        # The writer is kept alive by this frame: closing it would lose later signals.
        while writer.fileno() >= 0:
            if any(number in STOP_SIGNALS for number in reader.recv(64)):
                self._event.set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


def _notify_watcher(writer: socket.socket, signal_number: int) -> None:
    """Tell the watcher from a Python-level handler too: uvloop takes the wake-up descriptor.

    Setting the event here could deadlock: the main thread may hold its lock in `wait`.
    """
    with contextlib.suppress(BlockingIOError):  # full: the watcher has plenty to read
        writer.send(bytes((signal_number,)))


class StopEvent(threading.Event):
    """A stop asked of a launcher, and by which signal."""

    signal_name = ""
    """`SIGINT` for Ctrl-C; empty if no signal did."""
    is_repeated = False
    """Asked again: nothing is waited for."""

    def set_by_signal(self, signal_number: int) -> None:
        self.is_repeated = self.is_set()
        self.signal_name = self.signal_name or signal.Signals(signal_number).name
        self.set()


@contextlib.contextmanager
def catch_stop_signals(message: str = "") -> Iterator[StopEvent]:
    """An event that SIGINT and SIGTERM set within the context; a message at the first of them.

    Outside the main thread, where Python handles no signals, nothing sets it.
    """
    stop = StopEvent()

    def request_stop(signal_number: int, frame: FrameType | None) -> None:
        if message and not stop.is_set():
            sys.stderr.write(f"{message}\n")
        stop.set_by_signal(signal_number)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {one: signal.signal(one, request_stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
