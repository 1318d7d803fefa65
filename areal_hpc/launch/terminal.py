"""What commands about runs print and hear at a terminal."""

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from areal_hpc.jobs.processes.process_setup import StopEvent
from areal_hpc.rundir.paths import RunPaths

STOPPING_MESSAGE = (
    "\nstopping: jobs save a checkpoint if there is time; the last one is kept in any case.\n"
    "Ctrl-C again ends them at once"
)


@contextmanager
def catch_stop_signals(message: str = "") -> Iterator[StopEvent]:
    """An event that SIGINT and SIGTERM set within the context; a message at the first of them.

    Outside the main thread, where Python handles no signals, nothing sets it.
    """
    stop = StopEvent()

    def request_stop(signal_number: int, frame: FrameType | None) -> None:
        if message and not stop.is_set():
            print(message, file=sys.stderr)
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


def get_program_command() -> str:
    path = Path(sys.argv[0])
    return shlex.quote(str(path)) if path.name == "areal-hpc" else "python -m areal_hpc"


def format_next_command(command: str, paths: RunPaths) -> str:
    return f"{get_program_command()} {command} {shlex.quote(str(paths.root))}"


def say(message: str) -> None:
    print(message, flush=True)
