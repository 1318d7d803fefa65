"""A process that answers lines with lines: of any Python, with an environment by allow-list."""

import asyncio
import contextlib
import errno
import fnmatch
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.errors import AgentError, WorkerStartError
from areal_hpc.jobs.processes.descendants import kill_and_reap_process, list_descendants
from areal_hpc.jobs.processes.machine_oom_kills import OomKillWatch
from areal_hpc.rollout.agent_errors import SHORTAGE_HINT, build_oom_kill_error

PASSED_VARIABLE_PATTERNS = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
)
"""Patterns of variables that hold no secret, and without which programs do not run."""
_PIECE_BYTES = 1 << 16
_EXIT_TIMEOUT_S = 1.0
"""For a process whose end of the link is closed to be over."""
_NO_PROGRAM_ERRNOS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EINVAL),
)
"""It is not there, or is no program. Anything else may be otherwise in a moment: the node has no
process, memory or descriptor left, or the storage does not answer."""


def select_passed_variables(
    environ: Mapping[str, str], extra_patterns: Sequence[str]
) -> dict[str, str]:
    """The variables of an environment that `PASSED_VARIABLE_PATTERNS` or further patterns name."""
    allowed = (*PASSED_VARIABLE_PATTERNS, *extra_patterns)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)
    }


class LineProcess:
    """One process, which answers one line at a time. It belongs to no event loop.

    Args:
        command: What `subprocess.Popen` is given; standard input and output are the link.
        process_name: What errors call it.
        max_answer_bytes: A longer answer is an error.

    Raises:
        WorkerStartError: No process can be started now.
        OSError: There is no such program, or it cannot be run.
    """

    def __init__(
        self,
        command: Mapping[str, Any],
        process_name: str,
        max_answer_bytes: int,
    ) -> None:
        self._name, self._max_answer_bytes = process_name, max_answer_bytes
        self._received = bytearray()
        self._is_asked = self._has_run_short = False
        with contextlib.ExitStack() as opened:
            try:
                self._link, theirs = map(opened.enter_context, socket.socketpair())
                self._process = subprocess.Popen(
                    **command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
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
        self._link.setblocking(False)

    @property
    def pid(self) -> int:
        """Its number, also of its process group."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """It lives, waits for a line, and had all that it needed for the last one."""
        is_free = not (self._is_asked or self._has_run_short)
        return is_free and self._process.poll() is None

    def mark_unusable_after_shortage(self) -> None:
        """It lacked something, perhaps by what it left open itself: nobody uses it again."""
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
                        raise AgentError(f"{self._name} has ended; see what it printed")
                    return socket.socket(fileno=descriptors[0])
        except TimeoutError:
            raise AgentError(f"{self._name} did not start within {timeout_s:g} s") from None

    async def ask(self, line: bytes, timeout_s: float | None = None) -> bytes:
        """What it answers to a line, which has no end of line. None: wait for ever.

        Raises:
            AgentError: It ends, takes too long or answers too much.
            NodeResourceShortageError: The kernel ended it for want of memory.
        """
        self._is_asked, oom_kills = True, OomKillWatch()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_sendall(self._link, line + b"\n")
                answer = await self._read_line()
        except TimeoutError:
            raise AgentError(f"{self._name} did not answer within {timeout_s:g} s") from None
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _EXIT_TIMEOUT_S)
            if oom_kills.may_have_killed(self._process.returncode):
                raise build_oom_kill_error(self._name) from error
            if isinstance(error, EOFError):
                raise AgentError(f"{self._name} has ended; see what it printed") from error
            raise AgentError(f"{self._name} cannot be talked to: {error}") from error
        self._is_asked = False
        return answer

    async def _read_line(self) -> bytes:
        while b"\n" not in self._received[-_PIECE_BYTES:]:
            piece = await asyncio.get_running_loop().sock_recv(self._link, _PIECE_BYTES)
            if not piece:
                raise EOFError
            self._received += piece
            if len(self._received) > self._max_answer_bytes:
                limit = self._max_answer_bytes >> 20
                raise AgentError(f"{self._name} answered more than {limit} MiB")
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        return bytes(line)

    def close(self) -> None:
        """End it, with all that it started."""
        if self._process.poll() is None:  # else its number may be another's
            started = list_descendants(self._process.pid)  # some may have left its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for one in started:
                kill_and_reap_process(one)
        self._process.wait()
        self._link.close()
