"""Pool of warm processes that answer one question at a time and are killed when an answer is late.

It is for computations that their own process cannot stop: Python's signal handlers need the main
thread, and do not interrupt C code. It works from any thread, inside an event loop and after forks.
"""

import contextlib
import os
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from areal_hpc.errors import ClusterError, WorkerLostError
from areal_hpc.jobs.processes.line_workers import LineProcess
from areal_hpc.jobs.processes.process_ties import spare_from_kill, stop_sparing_from_kill

MAX_ANSWER_BYTES = 1 << 20
START_TIMEOUT_S = 60.0
"""Time limit for a process's imports, which may lie on a slow file system."""
OPENING = READY_ANSWER = b"{}"


class VerifierPool:
    """Pool of processes of one program, started when needed and kept, at most one per core.

    The program gets `OPENING` as its first line, and answers `READY_ANSWER` when it is ready. It
    must ignore the signals that stop the parent, and end by itself soon after `timeout_s`, because
    its parent may have been killed meanwhile. It needs no module of this package.

    Args:
        open_command: Opens the arguments of `subprocess.Popen`, without standard streams.
        timeout_s: Time limit of one answer.
    """

    def __init__(
        self, open_command: Callable[[], AbstractContextManager[dict[str, Any]]], timeout_s: float
    ) -> None:
        self._open_command, self._timeout_s = open_command, timeout_s
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # threads that held slots are gone there

    def ask(self, question: bytes) -> bytes:
        """Send a line, and return the answer, a line; wait while all processes are busy.

        Raises:
            TimeoutError: No answer came within `timeout_s`.
            WorkerLostError: The process died.
            RecipeError: This machine cannot start the process with these settings.
            ClusterError: The process could not be started, or the out-of-memory killer ended it.
        """
        with self._slots:
            process = self._take_process()
            try:
                return process.ask_blocking(question, self._timeout_s)
            finally:
                if process.is_usable:
                    self._idle.append(process)
                else:
                    _end_process(process)

    def close(self) -> None:
        """Kill idle processes, which otherwise end with this process."""
        while self._idle:
            _end_process(self._idle.pop())

    def _reset(self) -> None:
        self._idle: list[LineProcess] = []
        self._starter = ThreadPoolExecutor(1, "verifier")
        self._slots = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))

    def _take_process(self) -> LineProcess:
        with contextlib.suppress(IndexError):  # no process is idle
            while not (idle := self._idle.pop()).is_usable:
                _end_process(idle)
            return idle
        # A process's parent-death signal comes when the thread that started it ends (prctl(2)).
        name, process = self._starter.submit(self._start_process).result()
        spare_from_kill(process.pid)
        fault = "not ready"
        try:
            if process.ask_blocking(OPENING, START_TIMEOUT_S) == READY_ANSWER:
                fault = ""
        except TimeoutError:
            fault = f"not ready after {START_TIMEOUT_S:g} s"
        except WorkerLostError:
            fault = "gone before it was ready"
        finally:
            if fault:
                _end_process(process)
        if fault:
            raise ClusterError(f"{name} was {fault}", hint="read its standard error")
        return process

    def _start_process(self) -> tuple[str, LineProcess]:
        with self._open_command() as command:
            name = shlex.join(command["args"])[-300:]
            try:
                return name, LineProcess(command, name, MAX_ANSWER_BYTES)
            except OSError as error:
                raise ClusterError(f"{name} cannot be started: {error}") from error


def _end_process(process: LineProcess) -> None:
    stop_sparing_from_kill(process.pid)
    process.close()
