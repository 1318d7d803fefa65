"""A process of a task as its supervisor sees it: started by `exec`, or forked by a fork server."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.jobs.processes.fork_server import (
    FORK_SERVER_MAIN,
    PRELOAD_OPTION,
    START_REQUEST,
    ForkReply,
)
from areal_hpc.jobs.processes.process_main import PARENT_VARIABLE, PROCESS_MAIN
from areal_hpc.rundir.jobs import ProcessSpec
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.rundir.paths import get_process_error_path

_MAX_REPLY_BYTES = 4096
_POLL_S = 0.05
_LOG_TAIL_BYTES = 64 * 1024
"""Read of the log of a process that said nothing else of its end: an agent may have written GBs."""
_KILL_TIMEOUT_S = 30.0
"""Longest that the end of a killed process is waited for: devices may have to be left first."""


class ForkServerClient:
    """A fork server and the process that it last forked; of that, what `Popen` would offer."""

    def __init__(
        self,
        python: str,
        entry: str,
        config_path: Path,
        log_path: Path,
        environ: Mapping[str, str],
    ) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            *(python, "-m", FORK_SERVER_MAIN, f"{PRELOAD_OPTION}{entry}"),
            *(str(config_path), str(theirs.fileno())),
        ]
        self._server = _start_process_in_own_session(command, log_path, environ, theirs.fileno())
        theirs.close()
        self.pid: int | None = None
        """The forked process; None until it has begun."""
        self._exit_code: int | None = None

    @property
    def is_server_alive(self) -> bool:
        return self._server.poll() is None

    def start_process(self) -> None:
        self.pid = self._exit_code = None
        with contextlib.suppress(BrokenPipeError):  # it died: `poll` notices
            self._channel.send(START_REQUEST)

    def poll(self) -> int | None:
        """The exit code of the process; None while it runs, or is about to.

        The process is killed, if its server died, and counts as killed in any case.
        """
        while self._exit_code is None and select.select([self._channel], [], [], 0)[0]:
            try:
                content = self._channel.recv(_MAX_REPLY_BYTES)
            except ConnectionResetError:
                content = b""
            if not content:
                self._exit_code = -signal.SIGKILL
                if self.pid is not None:
                    _signal_process_group(self.pid, signal.SIGKILL)
                break
            reply = msgspec.json.decode(content, type=ForkReply)
            self.pid, self._exit_code = reply.pid, reply.exit_code
        return self._exit_code

    def terminate(self) -> None:
        """SIGTERM to the process; one that has not begun will not."""
        if self.poll() is not None:
            return
        if self.pid is None:
            self._server.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def signal_session(self, signal_number: int) -> None:
        """Signal the process and all that it started; one that has not begun will not."""
        if self.poll() is not None:
            return  # the server has killed whatever was left
        if self.pid is None:
            self._server.kill()
        else:
            _signal_process_group(self.pid, signal_number)

    def wait(self) -> int:
        """Wait for the end of the killed process; its exit code. A server that hangs is killed."""
        give_up_at = time.monotonic() + _KILL_TIMEOUT_S
        while (code := self.poll()) is None:
            select.select([self._channel], [], [], _POLL_S)
            if time.monotonic() >= give_up_at:
                self._server.kill()
        return code

    def kill_server(self) -> None:
        self._server.kill()
        self._server.wait()
        self._channel.close()


class ExecutedProcess:
    """A process that was started as a program of its own; the same part of `Popen`."""

    def __init__(
        self,
        python: str,
        entry: str,
        config_path: Path,
        log_path: Path,
        environ: Mapping[str, str],
    ) -> None:
        command = [python, "-m", PROCESS_MAIN, entry, str(config_path)]
        self._process = _start_process_in_own_session(command, log_path, environ)
        self.poll = self._process.poll
        self.terminate = self._process.terminate
        self.wait = self._process.wait

    def signal_session(self, signal_number: int) -> None:
        _signal_process_group(self._process.pid, signal_number)


def _start_process_in_own_session(
    command: list[str], log_path: Path, environ: Mapping[str, str], *descriptors: int
) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log_file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env={**environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
            pass_fds=descriptors,
        )


def _signal_process_group(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal_number)


@dataclass(slots=True)
class ManagedProcess:
    """A process of a task, how often it has been started, and how often it crashed lately."""

    spec: ProcessSpec
    log_path: Path
    config_path: Path
    starts: int = 0
    started_at: float = 0.0
    crashes_without_progress: int = 0
    not_before: float = 0.0
    process: ExecutedProcess | ForkServerClient | None = None
    """Its present start; None between two."""
    is_killed_for_restart: bool = False
    """It is being killed, and starts again once it has ended."""
    ended_at: float | None = None
    """When its present start was seen to have ended."""
    _progress_bytes: int = 0
    _server: ForkServerClient | None = None

    def start(self, python: str, environ: Mapping[str, str]) -> None:
        """Start it once more."""
        self.starts += 1
        self.started_at = time.monotonic()
        self.is_killed_for_restart, self.ended_at = False, None
        self._progress_bytes = max(self._progress_bytes, self._read_progress_bytes())
        get_process_error_path(self.config_path).unlink(missing_ok=True)
        start = (python, self.spec.entry, self.config_path, self.log_path, environ)
        if not self.spec.is_forked:
            self.process = ExecutedProcess(*start)
            return
        if self._server is None or not self._server.is_server_alive:
            self.kill_fork_server()
            self._server = ForkServerClient(*start)
        self._server.start_process()
        self.process = self._server

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal_session(self, signal_number: int) -> None:
        if self.process is not None:
            self.process.signal_session(signal_number)

    def made_progress(self) -> bool:
        return self._read_progress_bytes() > self._progress_bytes

    def _read_progress_bytes(self) -> int:
        try:
            return Path(self.spec.progress).stat().st_size if self.spec.progress else 0
        except FileNotFoundError:
            return 0

    @property
    def has_written_error_file(self) -> bool:
        return get_process_error_path(self.config_path).exists()

    def read_error_or_log_tail(self) -> str:
        """The error the process left, or the end of its log."""
        left = get_process_error_path(self.config_path)
        if left.exists():
            return left.read_text()
        tail = read_tail_lines(self.log_path, _LOG_TAIL_BYTES)
        return "\n".join(tail.decode(errors="replace").splitlines()[-12:])

    def kill_fork_server(self) -> None:
        if self._server is not None:
            self._server.kill_server()
            self._server = None
