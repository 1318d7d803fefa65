"""A fork server for tests: processes that begin in 0.1 s, with all that they import at hand.

The processes are what the commands would be, but for the interpreter's start. The server ends with
the test process, and takes them along.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from areal_hpc.jobs.processes.die_with_parent import die_with_parent
from areal_hpc.jobs.processes.fork_server import is_fork_safe
from areal_hpc.jobs.processes.process_main import PARENT_VARIABLE, PROCESS_MAIN, run_entry
from tests.support.deadlines import Deadline
from tests.support.environments import CHECKOUT

PRELOADED = (
    "areal_hpc.cli.main",
    "areal_hpc.launch.run",
    "areal_hpc.proxy.job",
    "areal_hpc.proxy.standalone",
    "areal_hpc.rollout.job",
    "areal_hpc.view.compare",
    "areal_hpc.view.diagnosis",
)
MAX_REQUEST_BYTES = 1 << 17


class ForkedProcess:
    """What `subprocess.Popen` would be."""

    def __init__(self, server: "_Server", pid: int) -> None:
        self.pid = pid
        self._server = server

    @property
    def returncode(self) -> int | None:
        return self._server.exit_codes.get(self.pid)

    def poll(self) -> int | None:
        self._server.listen(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, below 0 by that signal.

        Raises:
            TimeoutError: It did not end in that time.
        """
        while (code := self.poll()) is None:
            if not self._server.listen(timeout):
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The test process's end."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.forked_processes", str(theirs.fileno())]
        self._process = subprocess.Popen(command, cwd=CHECKOUT, pass_fds=[theirs.fileno()])
        theirs.close()
        self._lock = threading.RLock()
        self._started: list[int] = []
        self.exit_codes: dict[int, int] = {}
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, words: Sequence[str], output: int, errors: int, **more: Any) -> ForkedProcess:
        request = {"words": [*words], "folder": str(Path.cwd()), "environ": {**os.environ}}
        with self._lock:
            socket.send_fds(
                self._channel, [json.dumps({**request, **more}).encode()], [output, errors]
            )
            while not self._started:
                assert self.listen(None)
            return ForkedProcess(self, self._started.pop())

    def listen(self, timeout_s: float | None) -> bool:
        """Read what the server tells, if it tells something in that time."""
        with self._lock:
            if not select.select([self._channel], [], [], timeout_s)[0]:
                return False
            told = self._channel.recv(MAX_REQUEST_BYTES)
            assert told, "the fork server has died"
            pid, code = json.loads(told)
            if code is None:
                self._started.append(pid)
            else:
                self.exit_codes[pid] = code
            return True

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


@functools.cache
def _get_server() -> _Server:
    return _Server()


def fork_job_process(
    entry: str,
    config_path: Path,
    log: Path,
    *,
    max_open_files: int = 0,
    constants: Mapping[str, int] | None = None,
) -> ForkedProcess:
    """A process of a job as `start_job_process` makes it, with smaller limits if some are given.

    Those are constants of modules: `areal_hpc.proxy.sessions.recorder.MAX_X`.
    """
    server = _get_server()
    with log.open("ab") as log_file:
        fd = log_file.fileno()
        words = [PROCESS_MAIN, entry, str(config_path)]
        more = {"max_open_files": max_open_files, "constants": {**(constants or {})}}
        return server.start(words, fd, fd, **more)


def fork_module(words: Sequence[str], errors: IO[bytes]) -> tuple[ForkedProcess, IO[str]]:
    """`python -m` with these words, and what it prints."""
    reading, writing = os.pipe()
    process = _get_server().start(words, writing, errors.fileno())
    os.close(writing)
    return process, os.fdopen(reading)


def run_module(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], timeout_s: float | None
) -> subprocess.CompletedProcess[str]:
    """How `python -m` with these words ended, and what it said.

    Raises:
        subprocess.TimeoutExpired: It did not end in time, and was killed.
    """
    deadline = None if timeout_s is None else Deadline(timeout_s)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = _get_server().start(
            words, output.fileno(), errors.fileno(), folder=str(folder), environ={**environ}
        )
        while process.poll() is None:
            try:
                process.wait(None if deadline is None else max(deadline.left_s, 0.0))
            except TimeoutError:
                if deadline is not None and deadline.is_over():
                    process.kill()
                    raise subprocess.TimeoutExpired([*words], deadline.limit_s) from None
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read())
    assert process.returncode is not None
    return subprocess.CompletedProcess([*words], process.returncode, *said)


def main() -> None:
    """Fork at every request; in a forked process, be what was asked for."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    assert is_fork_safe(), "an import has started a thread"
    gc.collect()
    gc.freeze()
    server = os.getpid()
    if request := _serve(channel):
        _become(request, server)


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    reading, writing = os.pipe()
    for fd in (reading, writing):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writing)
    children: set[int] = set()
    while True:
        ready = select.select([channel.fileno(), reading], [], [])[0]
        if reading in ready:
            os.read(reading, 4096)
            for pid in [*children]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.remove(pid)
                    channel.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
        if channel.fileno() not in ready:
            continue
        text, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 2)
        if not text:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(fds[0], 1)
            os.dup2(fds[1], 2)
            for fd in (reading, writing, *fds):
                os.close(fd)
            channel.close()
            request: dict[str, Any] = json.loads(text)
            return request
        for fd in fds:
            os.close(fd)
        children.add(child)
        channel.send(json.dumps([child, None]).encode())


def _become(request: dict[str, Any], server: int) -> None:
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    if limit := request.get("max_open_files"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for name, value in request.get("constants", {}).items():
        owner, _, constant = name.rpartition(".")
        setattr(importlib.import_module(owner), constant, value)
    module, *arguments = request["words"]
    if module == PROCESS_MAIN:
        os.environ[PARENT_VARIABLE] = str(server)
        run_entry(arguments[0], Path(arguments[1]), server)
    else:
        die_with_parent(signal.SIGKILL)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
