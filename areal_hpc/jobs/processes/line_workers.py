"""Worker processes of any Python that answer lines with lines, and a pool of them.

A worker's standard input is a socket, which closes when the parent dies; its output goes to
standard error. Event loops and threads can call workers.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from areal_hpc.errors import (
    AgentError,
    NodeResourceShortageError,
    WorkerLostError,
    WorkerStartError,
)
from areal_hpc.jobs.processes.process_ties import end_process, list_descendants

_VMSTAT_PATH = Path("/proc/vmstat")
_COUNTER = b"oom_kill "
"""Counter of kills in all control groups; the kernel counts before it kills."""


def count_oom_kills() -> int:
    """Count out-of-memory kills since the machine started; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError, ValueError):
        for line in _VMSTAT_PATH.read_bytes().splitlines():
            if line.startswith(_COUNTER):
                return int(line.removeprefix(_COUNTER))
    return 0


SHORTAGE_HINT = "give the job what is missing, or lower rollout.max_concurrent_rollouts"
_LOSS_HINT = "see what it printed"
_PIECE_BYTES = 1 << 16
_EXIT_TIMEOUT_S = 1.0
"""Time for a process to end after its end of the socket was closed."""
_NO_PROGRAM_ERRNOS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EINVAL),
)
"""Errors of a missing file, or of a file that is no program. Other errors may pass: the node has no
process, memory or descriptor left, or the storage does not answer."""


class LineProcess:
    """Worker process that answers one line at a time. It belongs to no event loop.

    A program that sets a parent death signal dies with the thread that started it (prctl(2)). A
    fork of the present process drops the sockets of workers and ends none of them.

    Args:
        command: Arguments of `subprocess.Popen` without standard streams.
        process_name: Name of the process in errors.
        max_answer_bytes: Length from which on an answer is an error.

    Raises:
        WorkerStartError: No process can be started now.
        OSError: There is no such program, or it cannot be run.
    """

    def __init__(
        self, command: Mapping[str, Any], process_name: str, max_answer_bytes: int
    ) -> None:
        self._name, self._max_answer_bytes = process_name, max_answer_bytes
        self._received = bytearray()
        self._is_asked = self._has_run_short = False
        with _fork_lock, contextlib.ExitStack() as opened:
            try:
                self._link, theirs = map(opened.enter_context, socket.socketpair())
                self._process = subprocess.Popen(
                    **command,
                    stdin=theirs.fileno(),
                    stdout=2,
                    start_new_session=True,
                )
            except OSError as error:
                if error.errno in _NO_PROGRAM_ERRNOS:
                    raise
                raise WorkerStartError(
                    f"{process_name} cannot be started now: {error}",
                    hint=SHORTAGE_HINT,
                ) from error
            theirs.close()
            opened.pop_all()
            # Ends the worker also if its pool was not closed, and at the end of this process.
            self._end = weakref.finalize(self, _end_process, self._process, self._link)
            _open_processes.add(self)
        self._link.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        is_free = not (self._is_asked or self._has_run_short)
        return is_free and self._process.poll() is None

    def mark_unusable_after_shortage(self) -> None:
        self._has_run_short = True

    async def receive_socket(self, timeout_s: float) -> socket.socket:
        """Receive the socket that the worker sends before its first line.

        Raises:
            AgentError: It ended without sending one, or takes too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        _, descriptors, _, _ = socket.recv_fds(self._link, 1, 1)
                    except BlockingIOError:
                        await asyncio.sleep(0.01)
                        continue
                    if not descriptors:
                        raise AgentError(f"{self._name} has ended", hint=_LOSS_HINT)
                    return socket.socket(fileno=descriptors[0])
        except TimeoutError:
            raise AgentError(f"{self._name} did not start within {timeout_s:g} s") from None

    async def ask(self, line: bytes, timeout_s: float | None = None) -> bytes:
        """Send a line, without its end of line, and return the answer. None: wait for ever.

        Raises:
            AgentError: The answer takes too long or is too long.
            WorkerLostError: The worker has ended.
            NodeResourceShortageError: The kernel killed the worker as memory ran out.
        """
        loop, oom_kills = asyncio.get_running_loop(), self._begin_question()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._link, line + b"\n")
                while (answer := self._take_line()) is None:
                    self._keep_piece(await loop.sock_recv(self._link, _PIECE_BYTES))
        except TimeoutError:
            raise AgentError(f"{self._name} did not answer within {timeout_s:g} s") from None
        except (EOFError, OSError) as error:
            raise await asyncio.to_thread(self._explain_loss, error, oom_kills) from error
        return answer

    def ask_blocking(self, line: bytes, timeout_s: float) -> bytes:
        """Do the same as `ask`, and block.

        Raises:
            TimeoutError: The answer takes too long.
            AgentError: The answer is too long.
            WorkerLostError: The worker has ended.
            NodeResourceShortageError: The kernel killed the worker as memory ran out.
        """
        deadline, oom_kills = time.monotonic() + timeout_s, self._begin_question()
        try:
            self._link.settimeout(timeout_s)
            self._link.sendall(line + b"\n")
            while (answer := self._take_line()) is None:
                self._link.settimeout(max(deadline - time.monotonic(), 0.001))
                self._keep_piece(self._link.recv(_PIECE_BYTES))
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise self._explain_loss(error, oom_kills) from error
        return answer

    def close(self) -> None:
        self._end()

    def disown(self) -> None:
        self._process.returncode = 0
        self._end.detach()
        self._link.close()

    def _begin_question(self) -> int:
        self._is_asked = True
        return count_oom_kills()

    def _take_line(self) -> bytes | None:
        if b"\n" not in self._received[-_PIECE_BYTES:]:
            return None
        self._is_asked = False
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        return bytes(line)

    def _keep_piece(self, piece: bytes) -> None:
        if not piece:
            raise EOFError
        self._received += piece
        if len(self._received) > self._max_answer_bytes:
            limit = self._max_answer_bytes >> 20
            raise AgentError(
                f"{self._name} answered more than {limit} MiB", hint="keep what is long in files"
            )

    def _explain_loss(
        self, error: EOFError | OSError, oom_kills: int
    ) -> WorkerLostError | NodeResourceShortageError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        code = self._process.returncode
        # The kernel counts kills of all processes together, so another one may have been killed.
        if code == -signal.SIGKILL and count_oom_kills() > oom_kills:
            return NodeResourceShortageError(
                f"{self._name} was killed: the memory of the job, or of the node, ran out",
                hint=SHORTAGE_HINT,
            )
        if code is None:
            return WorkerLostError(f"{self._name} closed its link: {error}", hint=_LOSS_HINT)
        return WorkerLostError(f"{self._name} exited with code {code}", hint=_LOSS_HINT)


_fork_lock = threading.RLock()
"""Lock against forks while a worker starts: a fork would inherit an end of the worker's socket, and
the worker would outlive its parent."""
_open_processes = weakref.WeakSet[LineProcess]()


def _release_in_fork() -> None:
    for process in _open_processes:
        process.disown()
    _open_processes.clear()
    _fork_lock.release()


os.register_at_fork(
    before=_fork_lock.acquire,
    after_in_parent=_fork_lock.release,
    after_in_child=_release_in_fork,
)


def _end_process(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    if process.poll() is None:  # else another process may have its id
        descendants = list_descendants(process.pid)  # some may have left its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in descendants:
            end_process(pid)
    process.wait()
    link.close()


class PooledWorker(Protocol):
    """Interface of a pool's workers."""

    @property
    def is_usable(self) -> bool:
        """Whether it is alive and free, and had enough resources for its last answer."""

    def close(self) -> None:
        """End the worker. Call it in a thread: the end of a process may take long."""


Worker = TypeVar("Worker", bound=PooledWorker)


class WorkerPool(Generic[Worker]):
    """Pool of at most `size` workers, which may serve one event loop after another.

    Args:
        size: Workers that may be in use at a time.
        start: Starts a worker.
    """

    def __init__(self, size: int, start: Callable[[], Awaitable[Worker]]) -> None:
        self._size, self._start = size, start
        self._idle: list[Worker] = []
        self._slots = asyncio.Semaphore(size)
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Worker]:
        """Yield a free worker; wait while all are in use; end a worker that became unusable."""
        async with self._get_slots():
            worker = await self._take_worker()
            try:
                yield worker
            finally:
                if worker.is_usable:
                    self._idle.append(worker)
                else:
                    await asyncio.to_thread(worker.close)

    def close_idle_workers(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _get_slots(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._slots, self._loop = asyncio.Semaphore(self._size), loop
        return self._slots

    async def _take_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_usable:
                return worker
            await asyncio.to_thread(worker.close)
        return await self._start()
