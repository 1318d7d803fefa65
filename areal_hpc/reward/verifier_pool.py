"""Warm processes that answer one question at a time and are killed when an answer is late.

For a computation that nothing in its own process can stop: Python's signals need the main thread,
and reach no C code. Works from any thread, in a running event loop, and after a fork.
"""

from __future__ import annotations

import atexit
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from areal_hpc.errors import ClusterError, VerifierLostError
from areal_hpc.jobs.processes.descendants import spare_from_kill, stop_sparing_from_kill

MAX_ANSWER_BYTES = 1 << 16
START_TIMEOUT_S = 60.0
"""Time a process may take to import its packages, which may lie on a slow file system."""


class VerifierPool:
    """Processes of one program, started when needed and kept, at most one per core.

    The program gets a socket as its standard input. It sends a line when it is ready and one for
    every line it reads, and ends when the socket closes, so that it dies with its parent. It must
    ignore what is sent to stop the parent, and end by itself soon after `timeout_s`: its parent may
    have been killed meanwhile. No module of this package is needed to run it.

    Args:
        open_command: Opens what `subprocess.Popen` is given, standard streams apart.
        timeout_s: Longest time of one answer.
        opening: A line that a process is sent before it is ready.
    """

    def __init__(
        self,
        open_command: Callable[[], AbstractContextManager[dict[str, Any]]],
        *,
        timeout_s: float,
        opening: bytes = b"",
    ) -> None:
        self._open_command, self._opening, self._timeout_s = open_command, opening, timeout_s
        self._lock = threading.RLock()
        self._init_empty_pool()
        # A fork while a process starts would give the child an end of a socket it knows nothing
        # of, and the process would outlive its parent.
        os.register_at_fork(
            before=self._lock.acquire,
            after_in_parent=self._lock.release,
            after_in_child=self._reset_after_fork,
        )
        atexit.register(self.close)

    def ask(self, question: bytes) -> bytes:
        """The answer, a line, to one line. Waits while a question per core is under way.

        Raises:
            TimeoutError: There was none within `timeout_s`.
            VerifierLostError: There will be none.
            RecipeError: This machine cannot start the process as it is asked to.
            ClusterError: No process could be started.
        """
        with self._places:
            process = self._get_or_start_process()
            try:
                answer = process.wait_ready_and_ask(question, self._timeout_s)
            except BaseException:  # boundary: after Ctrl-C too its answer would come too late
                self._kill_process(process)
                raise
            self._idle.append(process)
            return answer

    def close(self) -> None:
        """Kill all of them. They die with this process in any case."""
        while self._started:
            self._started.pop().kill()
        self._idle.clear()

    def _get_or_start_process(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive():
                    return process
                self._kill_process(process)
            with self._open_command() as command:
                process = _Process(command, self._opening)
            self._started.add(process)
            return process

    def _kill_process(self, process: _Process) -> None:
        self._started.discard(process)
        process.kill()

    def _init_empty_pool(self) -> None:
        self._started: set[_Process] = set()
        self._idle: list[_Process] = []
        self._places = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))

    def _reset_after_fork(self) -> None:
        """In the child of a fork: the processes, and threads that hold places, are the parent's."""
        for process in self._started:
            process.disown()
        self._init_empty_pool()
        self._lock.release()


class _Process:
    """One process and the socket to it."""

    def __init__(self, command: dict[str, Any], opening: bytes) -> None:
        self._name = shlex.join(command["args"])[-300:]
        self._opening, self._is_ready = opening, False
        self._socket, end = socket.socketpair()
        try:
            with end:
                self._process = subprocess.Popen(
                    **command, stdin=end.fileno(), stdout=subprocess.DEVNULL
                )
        except OSError as error:
            self._socket.close()
            raise ClusterError(f"{self._name} cannot be started: {error}") from error
        spare_from_kill(self._process.pid)

    def wait_ready_and_ask(self, question: bytes, timeout_s: float) -> bytes:
        if not self._is_ready:
            what = ""
            try:
                if self._exchange_bytes(self._opening, START_TIMEOUT_S).startswith(b'{"error"'):
                    what = "not ready"
            except TimeoutError:
                what = f"not ready after {START_TIMEOUT_S:g} s"
            except VerifierLostError:
                what = "gone before it was ready"
            if what:
                raise ClusterError(
                    f"{self._name} was {what}", hint="read what it wrote to standard error"
                )
            self._is_ready = True
        return self._exchange_bytes(question, timeout_s)

    def _exchange_bytes(self, question: bytes, timeout_s: float) -> bytes:
        deadline, answer = time.monotonic() + timeout_s, b""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(question)
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = self._socket.recv(MAX_ANSWER_BYTES)
                answer += piece
                if not piece or len(answer) > MAX_ANSWER_BYTES:
                    raise VerifierLostError
        except ConnectionError as error:
            raise VerifierLostError from error
        return answer.removesuffix(b"\n")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        stop_sparing_from_kill(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def disown(self) -> None:
        """Give up this copy of the socket; the process is another one's child."""
        self._socket.close()
        self._process.returncode = 0
