"""Process pool for user code; a hung or dead worker costs one call.

The standard pools lose every call in flight when one process dies, and keep a hung one forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from multiprocessing.reduction import ForkingPickler
from typing import IO, Any

from areal_hpc.errors import (
    AgentError,
    NodeResourceShortageError,
    WorkerLostError,
    WorkerStartError,
)
from areal_hpc.jobs.processes.descendants import (
    become_child_subreaper,
    kill_and_reap_process,
    kill_descendants,
    list_descendants,
)
from areal_hpc.jobs.processes.die_with_parent import die_with_parent
from areal_hpc.jobs.processes.machine_oom_kills import OomKillWatch
from areal_hpc.rollout.agent_errors import SHORTAGE_HINT, build_oom_kill_error
from areal_hpc.rollout.execution.answers import (
    MAX_ANSWER_BYTES,
    decode_returned_or_raise,
    encode_raised,
    encode_returned,
)
from areal_hpc.rollout.execution.worker_pool import WorkerPool

_IMPORT_HOOKS = ("areal_hpc.areal.import_hook",)
"""Modules that change what can be imported, and that a child imports where its parent has."""
_SERVE_SCRIPT = """
import importlib, json, sys
sys.path[:], hooks = json.loads(sys.argv[1])
for hook in hooks:
    importlib.import_module(hook)
from areal_hpc.rollout.execution.process_pool import serve_calls
serve_calls(*map(int, sys.argv[2:]))
"""
"""The child imports from where its parent does, whatever its environment says."""
_EXIT_TIMEOUT_S = 1.0
_READY = b"ready\n"
"""What a child says when it waits for calls. One that ends before had not started."""
_CALL_HEADER = struct.Struct("!Q")
"""Before each call: its size."""


class ProcessPool:
    """At most `size` processes, started when they are needed and reused one call after the other.

    Calls are plain functions; they and their arguments must be picklable, and travel to the process
    over a socket. What comes back is JSON (`answers.py`). Processes that a call started are killed
    at its end. Their environment is `environ`; None: that of this process.
    """

    def __init__(self, size: int, environ: Mapping[str, str] | None = None) -> None:
        async def start() -> _Process:
            return _Process(environ)

        self._processes = WorkerPool(size, start)

    def acquire(self) -> AbstractAsyncContextManager[_Process]:
        """A process to oneself; waits while all are taken."""
        return self._processes.acquire()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the function returned. Cancelling it kills the process.

        Raises:
            WorkerLostError: The process died.
            NodeResourceShortageError: The kernel ended it for want of memory.
            WorkerStartError: None can be started now.
            Exception: Whatever the function raised.
        """
        async with self.acquire() as process:
            return await process.call(function, *args, **kwargs)

    def kill_idle_processes(self) -> None:
        """Kill idle processes."""
        self._processes.close_idle_workers()


class _Process:
    """One child, and the socket of calls and answers."""

    def __init__(self, environ: Mapping[str, str] | None) -> None:
        hooks = [name for name in _IMPORT_HOOKS if name in sys.modules]
        script = [sys.executable, "-c", _SERVE_SCRIPT, json.dumps([sys.path, hooks])]
        with contextlib.ExitStack() as opened:
            try:
                self._link, theirs = map(opened.enter_context, socket.socketpair())
                self._child = subprocess.Popen(
                    [*script, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environ,
                    start_new_session=True,
                )
            except OSError as error:
                raise WorkerStartError(
                    f"a worker process cannot be started: {error}", hint=SHORTAGE_HINT
                ) from error
            theirs.close()
            opened.pop_all()
        self._link.setblocking(False)
        # Of a pool that nobody closed, and at the end of this process.
        weakref.finalize(self, _end_child, self._child, self._link)
        self._is_ready = self._answering = self._has_run_short = False

    @property
    def is_usable(self) -> bool:
        """Alive, not in the middle of a call, and with all that it needed for the last one."""
        is_free = not (self._answering or self._has_run_short)
        return is_free and self._child.poll() is None

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like `ProcessPool.call`."""
        call = ForkingPickler.dumps((function, args, kwargs))
        self._answering, oom_kills = True, OomKillWatch()
        try:
            loop = asyncio.get_running_loop()
            # A child that is starting reads nothing yet: the event loop must not wait for it.
            self._is_ready = self._is_ready or await self._read_line() == _READY
            await loop.sock_sendall(self._link, _CALL_HEADER.pack(len(call)))
            await loop.sock_sendall(self._link, call)
            line = await self._read_line()
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._child.wait, _EXIT_TIMEOUT_S)
            code = self._child.returncode
            if oom_kills.may_have_killed(code):
                raise build_oom_kill_error("the worker process") from error
            if not self._is_ready:
                raise WorkerStartError(
                    f"a worker process exited with code {code} before it took a call",
                    hint=f"see what it printed; {SHORTAGE_HINT}",
                ) from error
            raise WorkerLostError(
                f"the worker process exited with code {code} during the call"
            ) from error
        self._answering = False
        try:
            return decode_returned_or_raise(line)
        except NodeResourceShortageError:
            self._has_run_short = True  # perhaps by descriptors that its own calls left open
            raise

    async def _read_line(self) -> bytes:
        """One line, of whatever pieces it comes in: the event loop goes on meanwhile."""
        loop, answer = asyncio.get_running_loop(), bytearray()
        while not answer.endswith(b"\n"):
            piece = await loop.sock_recv(self._link, 1 << 16)
            if not piece:
                raise EOFError
            answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise AgentError(
                    f"the worker process answered more than {MAX_ANSWER_BYTES >> 20} MiB",
                    hint="return rewards, and keep the rest in files or in `Reward.note`",
                )
        return bytes(answer)

    def close(self) -> None:
        """End the child, whatever it does, and all that it started."""
        below = list_descendants(self._child.pid)
        _end_child(self._child, self._link)
        for one in below:
            kill_and_reap_process(one)


def _end_child(child: subprocess.Popen[bytes], answer_socket: socket.socket) -> None:
    """Kill a child with its process group."""
    if child.poll() is None:  # else its number may be another's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    answer_socket.close()


def serve_calls(link_fd: int, parent: int) -> None:
    """The child: answer calls until the parent closes the link."""
    with socket.socket(fileno=link_fd) as link, link.makefile("rb") as calls:
        os.set_inheritable(link_fd, False)
        _serve_calls(calls, link, parent)


def _serve_calls(call_stream: IO[bytes], answer_socket: socket.socket, parent_pid: int) -> None:
    die_with_parent(signal.SIGKILL)
    become_child_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us
    if os.getppid() != parent_pid:
        return
    answer_socket.sendall(_READY)
    while True:
        kept = frozenset(list_descendants(os.getpid()))
        call = _read_call(call_stream)
        if not call:
            return
        try:
            function, args, kwargs = ForkingPickler.loads(call)
        except Exception as error:  # boundary: unpickling imports the user's modules
            answer_socket.sendall(encode_raised(error))
            continue
        try:
            answer = encode_returned(function(*args, **kwargs))
        except (Exception, SystemExit) as error:  # boundary: the user's code; told to the parent
            answer = encode_raised(error)
        kill_descendants(os.getpid(), kept)
        answer_socket.sendall(answer)


def _read_call(calls: IO[bytes]) -> bytes:
    """The next call; nothing if the parent has closed the link."""
    header = calls.read(_CALL_HEADER.size)
    if len(header) < _CALL_HEADER.size:
        return b""
    (size,) = _CALL_HEADER.unpack(header)
    call = calls.read(size)
    return call if len(call) == size else b""
