"""Process pool for user code; a hung or dead worker costs one call.

The standard pools lose every call in flight when one process dies, and keep a hung one forever.
"""

import asyncio
import base64
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

from areal_hpc.errors import AgentError, NodeResourceShortageError, WorkerStartError
from areal_hpc.jobs.processes.descendants import (
    become_child_subreaper,
    kill_descendants,
    list_descendants,
)
from areal_hpc.jobs.processes.die_with_parent import die_with_parent
from areal_hpc.jobs.processes.line_process import SHORTAGE_HINT, LineProcess
from areal_hpc.jobs.processes.worker_pool import WorkerPool
from areal_hpc.rollout.execution.answers import (
    MAX_ANSWER_BYTES,
    decode_returned_or_raise,
    encode_raised,
    encode_returned,
)

START_TIMEOUT_S = 300.0
"""Time a process may take for its imports, which may lie on a slow file system."""
_IMPORT_HOOKS = ("areal_hpc.areal.import_hook",)
"""Modules that change what can be imported, and that a child imports where its parent has."""
_SERVE_SCRIPT = """
import importlib, json, os, socket, sys
link = socket.socket(fileno=os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:], hooks = json.loads(sys.argv[1])
for hook in hooks:
    importlib.import_module(hook)
from areal_hpc.rollout.execution.process_pool import serve_calls
serve_calls(link, int(sys.argv[2]))
"""
"""The child imports from where its parent does, whatever its environment says. No program that it
starts has its link."""


class WorkerProcess(LineProcess):
    """A process that runs user code, and answers as `answers.py` says."""

    async def request(self, line: bytes) -> Any:
        """What the user's code returned, or raises what it raised.

        Raises:
            WorkerLostError: The process died.
            NodeResourceShortageError: The node lacks something; the process is not used again.
        """
        try:
            return decode_returned_or_raise(await self.ask(line))
        except NodeResourceShortageError:
            self.mark_unusable_after_shortage()
            raise

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = ForkingPickler.dumps((function, args, kwargs))
        return await self.request(base64.b64encode(call))


class ProcessPool(WorkerPool[WorkerProcess]):
    """Processes for calls of plain functions, one after the other.

    These and their arguments must be picklable. What comes back is JSON (`answers.py`). Processes
    that a call started are killed at its end. Their environment is `environ`; None: that of this
    process.
    """

    def __init__(self, size: int, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(size, partial(_start_call_process, environ))

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function returned. Cancelling it kills the process."""
        async with self.acquire() as process:
            return await process.call(function, *args, **kwargs)


async def _start_call_process(environ: Mapping[str, str] | None) -> WorkerProcess:
    hooks = [name for name in _IMPORT_HOOKS if name in sys.modules]
    script = [sys.executable, "-c", _SERVE_SCRIPT, json.dumps([sys.path, hooks]), str(os.getpid())]
    try:
        process = WorkerProcess(
            {"args": script, "env": environ}, "the worker process", MAX_ANSWER_BYTES
        )
    except OSError as error:
        raise WorkerStartError(f"{sys.executable} cannot be started: {error}") from error
    try:
        await process.ask(b"", START_TIMEOUT_S)
    except BaseException as error:  # boundary: cancelled, too; nothing stays
        await asyncio.to_thread(process.close)
        if isinstance(error, AgentError):
            raise WorkerStartError(
                f"{error.problems[0].message} before it took a call",
                hint=f"see what it printed; {SHORTAGE_HINT}",
            ) from error
        raise
    return process


def serve_calls(link: socket.socket, parent_pid: int) -> None:
    """The child: answer calls until the parent closes the link."""
    die_with_parent(signal.SIGKILL)
    become_child_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us
    if os.getppid() != parent_pid:
        return
    with link, link.makefile("rb") as lines:
        link.sendall(lines.readline())  # it is ready
        for line in lines:
            kept = frozenset(list_descendants(os.getpid()))
            answer = _call_and_encode(line)
            kill_descendants(os.getpid(), kept)
            link.sendall(answer)


def _call_and_encode(line: bytes) -> bytes:
    try:
        function, args, kwargs = ForkingPickler.loads(base64.b64decode(line))
        return encode_returned(function(*args, **kwargs))
    except (Exception, SystemExit) as error:  # boundary: the user's code, imported and called
        return encode_raised(error)
