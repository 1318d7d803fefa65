"""Processes forked from a server that has imported their modules, so that they start in 0.1 s.

They behave as the commands do, but for the interpreter's start. The server ends with the test
process, and ends them too.
"""

import atexit
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from areal_hpc.jobs.processes.process_main import PARENT_VARIABLE, PROCESS_MAIN, run_entry
from areal_hpc.jobs.processes.process_ties import die_with_parent
from tests.support.deadlines import Deadline

PRELOADED = (
    "areal_hpc.cli.main",
    "areal_hpc.launch.run",
    "areal_hpc.proxy.job",
    "areal_hpc.proxy.standalone",
    "areal_hpc.rollout.job",
    "areal_hpc.view.state.summary",
    "areal_hpc.view.diagnosis",
    "tests.support.forked_processes",
)
_LOCK = threading.RLock()
"""Several threads of a test may ask for the same process."""
_STARTED: list["ForkedProcess"] = []


@functools.cache
def _get_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    atexit.register(_kill_started)  # else it waits for them
    return context


def _kill_started() -> None:
    for process in _STARTED:
        process.kill()


class ForkedProcess:
    """Stand-in for `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], output: int, errors: int, **more: Any) -> None:
        request = {"words": [*words], "folder": str(Path.cwd()), "environ": {**os.environ}}
        with _LOCK:
            target, streams = _become, (DupFd(output), DupFd(errors))
            self._process = _get_server().Process(target=target, args=(request | more, *streams))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        _STARTED.append(self)

    @property
    def returncode(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code, which is below 0 after a signal.

        Raises:
            TimeoutError: It did not end in that time.
        """
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        code = self.returncode
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_job_process(
    entry: str,
    config_path: Path,
    log: Path,
    *,
    max_open_files: int = 0,
    constants: Mapping[str, int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ForkedProcess:
    """A process of a job as `start_job_process` makes it, with smaller limits if some are given.

    Those are constants of modules: `areal_hpc.proxy.sessions.recorder.MAX_X`.
    """
    with log.open("ab") as log_file:
        fd = log_file.fileno()
        words = [PROCESS_MAIN, entry, str(config_path)]
        more = {"max_open_files": max_open_files, "constants": {**(constants or {})}}
        return ForkedProcess(words, fd, fd, environ={**environ}, **more)


def fork_module(words: Sequence[str], errors: IO[bytes]) -> tuple[ForkedProcess, IO[str]]:
    reading, writing = os.pipe()
    process = ForkedProcess(words, writing, errors.fileno())
    os.close(writing)
    return process, os.fdopen(reading)


def run_module(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], timeout_s: float | None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with these words, and return its exit code and output.

    Raises:
        subprocess.TimeoutExpired: It did not end in time, and was killed.
    """
    deadline = None if timeout_s is None else Deadline(timeout_s)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = ForkedProcess(
            words, output.fileno(), errors.fileno(), folder=str(folder), environ={**environ}
        )
        while process.poll() is None:
            try:
                process.wait(None if deadline is None else max(deadline.left_s, 0.0))
            except TimeoutError:
                if deadline is not None and deadline.is_over():
                    process.kill()
                    raise subprocess.TimeoutExpired([*words], deadline.limit_s) from None
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    assert process.returncode is not None
    return subprocess.CompletedProcess([*words], process.returncode, *texts)


def _become(request: dict[str, Any], output: Any, errors: Any) -> None:
    """Become the requested module in a forked process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, number in ((output, 1), (errors, 2)):
        fd = stream.detach()
        os.dup2(fd, number)
        os.close(fd)
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
        server = os.getppid()
        os.environ[PARENT_VARIABLE] = str(server)
        run_entry(arguments[0], Path(arguments[1]), server)
    else:
        die_with_parent(signal.SIGKILL)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
