"""Worker processes of any Python that answer lines with lines, and a pool of them.

Their standard input is the link, a socket, which closes when their parent dies. What they print
goes to standard error. They are asked in an event loop or from threads.
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
"""Of all control groups; the kernel counts before it kills."""


def count_oom_kills() -> int:
    """Out-of-memory kills since this machine started; 0 where the kernel does not count them."""
    with contextlib.suppress(OSError, ValueError):
        for line in _VMSTAT_PATH.read_bytes().splitlines():
            if line.startswith(_COUNTER):
                return int(line.removeprefix(_COUNTER))
    return 0


SHORTAGE_HINT = "give the job what is missing, or lower rollout.max_concurrent_rollouts"
_LOSS_HINT = "see what it printed"
_PIECE_BYTES = 1 << 16
_EXIT_TIMEOUT_S = 1.0
"""For a process whose end of the link is closed to be over."""
_NO_PROGRAM_ERRNOS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EINVAL),
)
"""It is not there, or is no program. Anything else may be otherwise in a moment: the node has no
process, memory or descriptor left, or the storage does not answer."""


class LineProcess:
    """One process, which answers one line at a time. It belongs to no event loop.

    A program that asks to die with its parent dies with the thread that started it (prctl(2)).
    A fork of this process has none of its links, and ends none of its processes.

    Args:
        command: What `subprocess.Popen` is given, standard streams apart.
        process_name: What errors call it.
        max_answer_bytes: A longer answer is an error.

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
            # Also of a pool that nobody closed, and at the end of this process.
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
        """The socket that it sends before it is asked anything.

        Raises:
            AgentError: It ended without, or takes too long.
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
        """What it answers to a line, which has no end of line. None: wait for ever.

        Raises:
            AgentError: It takes too long or answers too much.
            WorkerLostError: It has ended.
            NodeResourceShortageError: The kernel ended it for want of memory.
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
        """Like `ask`, and blocks.

        Raises:
            TimeoutError: It takes too long.
            AgentError: It answers too much.
            WorkerLostError: It has ended.
            NodeResourceShortageError: The kernel ended it for want of memory.
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
        # A kill may have been another process's: the kernel counts them all together.
        if code == -signal.SIGKILL and count_oom_kills() > oom_kills:
            return NodeResourceShortageError(
                f"{self._name} was killed: the memory of the job, or of the node, ran out",
                hint=SHORTAGE_HINT,
            )
        if code is None:
            return WorkerLostError(f"{self._name} closed its link: {error}", hint=_LOSS_HINT)
        return WorkerLostError(f"{self._name} exited with code {code}", hint=_LOSS_HINT)


_fork_lock = threading.RLock()
"""A fork while a process starts would have an end of a link that it knows nothing of, and the
process would outlive its parent."""
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
    if process.poll() is None:  # else its number may be another's
        started = list_descendants(process.pid)  # some may have left its session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in started:
            end_process(one)
    process.wait()
    link.close()


class PooledWorker(Protocol):
    """What a pool asks of its workers."""

    @property
    def is_usable(self) -> bool:
        """It lives, nobody waits for its answer, and it had what it needed for the last one."""

    def close(self) -> None:
        """End it, whatever it does: in a thread, for a process may take its time to be gone."""


Worker = TypeVar("Worker", bound=PooledWorker)


class WorkerPool(Generic[Worker]):
    """At most `size` workers. It may serve one event loop after another.

    Args:
        size: Workers that may be in use at a time.
        start: Starts a worker.
    """

    def __init__(self, size: int, start: Callable[[], Awaitable[Worker]]) -> None:
        self._size, self._start = size, start
        self._idle: list[Worker] = []
        self._places = asyncio.Semaphore(size)
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Worker]:
        """A worker to oneself; waits while all are in use. One left unusable is ended."""
        async with self._get_places():
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

    def _get_places(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._places, self._loop = asyncio.Semaphore(self._size), loop
        return self._places

    async def _take_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_usable:
                return worker
            await asyncio.to_thread(worker.close)
        return await self._start()
