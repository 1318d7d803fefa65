"""Warm processes that answer one question at a time and are killed when an answer is late.

For a computation that nothing in its own process can stop: Python's signals need the main thread,
and reach no C code. Works from any thread, in a running event loop, and after a fork.
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
"""Time a process may take to import its packages, which may lie on a slow file system."""
OPENING = READY_ANSWER = b"{}"


class VerifierPool:
    """Processes of one program, started when needed and kept, at most one per core.

    The program gets `OPENING` as its first line, and answers `READY_ANSWER` when it is ready. It
    must ignore what is sent to stop the parent, and end by itself soon after `timeout_s`: its
    parent may have been killed meanwhile. No module of this package is needed to run it.

    Args:
        open_command: Opens what `subprocess.Popen` is given, standard streams apart.
        timeout_s: Longest time of one answer.
    """

    def __init__(
        self, open_command: Callable[[], AbstractContextManager[dict[str, Any]]], timeout_s: float
    ) -> None:
        self._open_command, self._timeout_s = open_command, timeout_s
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # its threads hold places no longer

    def ask(self, question: bytes) -> bytes:
        """The answer, a line, to one line. Waits while a question per core is under way.

        Raises:
            TimeoutError: There was none within `timeout_s`.
            WorkerLostError: There will be none.
            RecipeError: This machine cannot start the process as it is asked to.
            ClusterError: No process could be started, or the kernel ended it for want of memory.
        """
        with self._places:
            process = self._take_process()
            try:
                return process.ask_blocking(question, self._timeout_s)
            finally:
                if process.is_usable:
                    self._idle.append(process)
                else:
                    _end_process(process)

    def close(self) -> None:
        """Kill those that are idle. All die with this process in any case."""
        while self._idle:
            _end_process(self._idle.pop())

    def _reset(self) -> None:
        self._idle: list[LineProcess] = []
        self._starter = ThreadPoolExecutor(1, "verifier")
        self._places = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))

    def _take_process(self) -> LineProcess:
        with contextlib.suppress(IndexError):  # none is idle
            while not (idle := self._idle.pop()).is_usable:
                _end_process(idle)
            return idle
        # What asks to die with its parent dies with the thread that started it (prctl(2)).
        name, process = self._starter.submit(self._start_process).result()
        spare_from_kill(process.pid)
        why_not = "not ready"
        try:
            if process.ask_blocking(OPENING, START_TIMEOUT_S) == READY_ANSWER:
                why_not = ""
        except TimeoutError:
            why_not = f"not ready after {START_TIMEOUT_S:g} s"
        except WorkerLostError:
            why_not = "gone before it was ready"
        finally:
            if why_not:
                _end_process(process)
        if why_not:
            raise ClusterError(f"{name} was {why_not}", hint="read what it wrote to standard error")
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
