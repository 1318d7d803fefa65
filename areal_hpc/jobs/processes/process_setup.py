"""Set-up of processes: log, limit of open files, and the stop signals of jobs and of commands.

Keep this module light: every process imports it.
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
"""Variable that is 1 in the processes of a run with `cluster.prometheus`."""


def raise_open_file_limit() -> None:
    """Raise this process's limit to the administrator's maximum.

    Logins and Slurm often set 1,024, which suits programs that use select(2). The ledger holds two
    connections per cell, and a proxy one per call of its agents.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class EscapingFormatter(logging.Formatter):
    """Formatter that escapes control characters, as records may quote a model."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def set_up_logging(level: int = logging.INFO) -> None:
    """Log one line per record to standard error, which the supervisor redirects to a file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """Request to stop, set by the first stop signal even while the main thread is in a C call.

    Python runs signal handlers only between bytecodes of the main thread, so a rank that waits
    inside a collective would never notice. The C handler writes to the wake-up descriptor at once,
    and a watcher thread reads it.
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
    """Notify the watcher from a Python-level handler, too: uvloop replaces the wake-up descriptor.

    Setting the event here could deadlock: the main thread may hold its lock in `wait`.
    """
    with contextlib.suppress(BlockingIOError):  # full, so the watcher has enough to read
        writer.send(bytes((signal_number,)))


class StopEvent(threading.Event):
    """Event that stops a launcher, with the signal that set it."""

    signal_name = ""
    """`SIGINT` for Ctrl-C; empty without a signal."""
    is_repeated = False
    """Whether it was set again, so that the launcher stops without waiting."""

    def set_by_signal(self, signal_number: int) -> None:
        self.is_repeated = self.is_set()
        self.signal_name = self.signal_name or signal.Signals(signal_number).name
        self.set()


@contextlib.contextmanager
def catch_stop_signals(message: str = "") -> Iterator[StopEvent]:
    """Yield an event that SIGINT and SIGTERM set; print a message at the first of them.

    Outside the main thread, where Python handles no signals, the event is never set.
    """
    stop = StopEvent()

    def request_stop(signal_number: int, frame: FrameType | None) -> None:
        if message and not stop.is_set():
            sys.stderr.write(f"{message}\n")
        stop.set_by_signal(signal_number)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handlers = {
        number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
