"""Process pool for user code; a hung or dead worker costs one call.

The standard pools lose every call in flight when one process dies, and keep a hung one forever.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from areal_hpc.errors import AgentError, WorkerLostError
from areal_hpc.jobs.processes.descendants import (
    adopt_orphans,
    kill_and_reap_process,
    kill_descendants,
    list_descendants,
)
from areal_hpc.jobs.processes.die_with_parent import die_with_parent
from areal_hpc.rollout.execution.answers import (
    MAX_ANSWER_BYTES,
    decode_answer,
    encode_raised,
    encode_returned,
)

_SPAWN_CONTEXT = multiprocessing.get_context("spawn")  # `fork` would copy locks that threads hold


class ProcessPool:
    """At most `size` processes, started when they are needed and reused one call after the other.

    Calls are plain functions; they and their arguments must be picklable, and travel to the process
    over a pipe. What comes back is JSON (`answers.py`). Processes that a call started are killed at
    its end.
    """

    def __init__(self, size: int) -> None:
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(size)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[_Process]:
        """A process to oneself; waits while all are taken."""
        async with self._places:
            process = self._idle.pop() if self._idle else _Process()
            try:
                yield process
            finally:
                if process.is_usable:
                    self._idle.append(process)
                else:
                    process.kill()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function returned. Cancelling it kills the process.

        Raises:
            WorkerLostError: The process died.
            Exception: Whatever the function raised.
        """
        async with self.acquire() as process:
            return await process.call(function, *args, **kwargs)

    def close(self) -> None:
        """Kill idle processes."""
        while self._idle:
            self._idle.pop().kill()


class _Process:
    """One child, the pipe of calls to it, and the socket of its answers."""

    def __init__(self) -> None:
        calls, self._pipe = _SPAWN_CONTEXT.Pipe(duplex=False)
        self._answers, answering = socket.socketpair()
        self._answers.setblocking(False)
        weakref.finalize(self, self._answers.close)  # of a pool that nobody closed
        self._child = _SPAWN_CONTEXT.Process(
            target=_serve_calls, args=(calls, answering, os.getpid()), daemon=True
        )
        with calls, answering:
            self._child.start()
        self._answering = False

    @property
    def is_usable(self) -> bool:
        """Alive, and not in the middle of a call."""
        return not self._answering and self._child.is_alive()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like `ProcessPool.call`."""
        self._answering = True
        try:
            self._pipe.send((function, args, kwargs))
            line = await self._read_answer()
        except (EOFError, OSError) as error:
            self._child.join(1.0)
            raise WorkerLostError(
                f"the worker process exited with code {self._child.exitcode} during the call"
            ) from error
        self._answering = False
        return decode_answer(line)

    async def _read_answer(self) -> bytes:
        """One line, of whatever pieces it comes in: the event loop goes on meanwhile."""
        loop, answer = asyncio.get_running_loop(), bytearray()
        while not answer.endswith(b"\n"):
            piece = await loop.sock_recv(self._answers, 1 << 16)
            if not piece:
                raise EOFError
            answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise AgentError(
                    f"the worker process answered more than {MAX_ANSWER_BYTES >> 20} MiB",
                    hint="return rewards, and keep the rest in files or in `Reward.note`",
                )
        return bytes(answer)

    def kill(self) -> None:
        """End the child, whatever it does, and all that it started."""
        pid = self._child.pid
        below = list_descendants(pid) if pid is not None else []
        self._child.kill()
        self._child.join()
        for one in below:
            kill_and_reap_process(one)
        self._pipe.close()
        self._answers.close()


def _serve_calls(calls: Connection, answers: socket.socket, parent: int) -> None:
    """The child: answer calls until the pipe closes."""
    die_with_parent(signal.SIGKILL)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us
    if os.getppid() != parent:
        return
    while True:
        kept = frozenset(list_descendants(os.getpid()))
        try:
            function, args, kwargs = calls.recv()
        except EOFError:
            return
        except Exception as error:  # boundary: unpickling imports the user's modules
            answers.sendall(encode_raised(error))
            continue
        try:
            answer = encode_returned(function(*args, **kwargs))
        except (Exception, SystemExit) as error:  # boundary: the user's code; told to the parent
            answer = encode_raised(error)
        kill_descendants(os.getpid(), kept)
        answers.sendall(answer)
