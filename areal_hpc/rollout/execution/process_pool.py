"""Process pool for user code; a hung or dead worker costs one call.

The standard pools lose every call in flight when one process dies, and keep a hung one forever.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

from areal_hpc.errors import AgentError, WorkerLostError
from areal_hpc.jobs.processes.die_with_parent import die_with_parent

_SPAWN_CONTEXT = multiprocessing.get_context("spawn")  # `fork` would copy locks that threads hold


class ProcessPool:
    """At most `size` processes, started when they are needed and reused one call after the other.

    Calls are plain functions; they and their arguments must be picklable. They travel over pipes
    between a process and its child, never over a network.
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
    """One child and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, end = _SPAWN_CONTEXT.Pipe()
        self._child = _SPAWN_CONTEXT.Process(
            target=_serve_calls, args=(end, os.getpid()), daemon=True
        )
        self._child.start()
        end.close()
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
            await self._await_answer()
            returned, raised = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._child.join(1.0)
            raise WorkerLostError(
                f"the worker process exited with code {self._child.exitcode} during the call"
            ) from error
        except Exception as error:  # boundary: the answer unpickles the user's classes
            raise AgentError(f"what the process answered cannot be read here: {error}") from error
        self._answering = False
        if raised is not None:
            raise raised
        return returned

    async def _await_answer(self) -> None:
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe.fileno(), answered.set)
        try:
            await answered.wait()
        finally:
            loop.remove_reader(self._pipe.fileno())

    def kill(self) -> None:
        """End the child, whatever it does."""
        self._child.kill()
        self._child.join()
        self._pipe.close()


def _serve_calls(pipe: Connection, parent: int) -> None:
    """The child: answer calls until the pipe closes."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us
    if os.getppid() != parent:
        return
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        except Exception as error:  # boundary: unpickling imports the user's modules
            _send_result(pipe, None, error)
            continue
        try:
            returned = function(*args, **kwargs)
        except (Exception, SystemExit) as error:  # boundary: the user's code; sent to the parent
            _send_result(pipe, None, error)
        else:
            _send_result(pipe, returned, None)


def _send_result(pipe: Connection, returned: Any, raised: BaseException | None) -> None:
    try:
        pipe.send((returned, raised))
    except Exception as error:  # boundary: what the user's code gave cannot be pickled
        what = f"{type(raised).__name__}: {raised}" if raised is not None else repr(returned)
        pipe.send((None, AgentError(f"{what:.500} cannot be sent back: {error}")))
