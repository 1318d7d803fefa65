"""Processes of measured steps: started, awaited together, and all gone at the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from areal_hpc.errors import ClusterError
from areal_hpc.inference.server.sglang_server import find_error_line
from areal_hpc.rundir.jsonl import read_tail_lines

POLL_S = 0.2
STOP_TIMEOUT_S = 30.0
LOG_TAIL_BYTES = 65536
DIE_WITH_PARENT_MODULE = "areal_hpc.jobs.processes.die_with_parent"


class Worker:
    """One process with its log, which does not outlive this one."""

    def __init__(
        self, worker_name: str, argv: Sequence[str], variables: Mapping[str, str], log: Path
    ) -> None:
        self.name, self.log = worker_name, log
        self._is_killed = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = self._spawn_process(argv, variables, output)

    @staticmethod
    def _spawn_process(
        argv: Sequence[str], variables: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", DIE_WITH_PARENT_MODULE, str(os.getpid()), *argv],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        return self._process.poll()

    def describe_end(self) -> str:
        line = find_error_line(read_tail_lines(self.log, LOG_TAIL_BYTES).decode(errors="replace"))
        return f"{self.name} exited with code {self.poll()}: {line or 'no output'}"

    def stop(self) -> None:
        """Ask it to end, and make it after a while."""
        if self.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End it and its children that are of its session."""
        if self._is_killed:
            return  # another process may have its number by now
        self._is_killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def await_workers_and_kill_rest(
    workers: Sequence[Worker], timeout_s: float, server: Worker | None = None
) -> None:
    """Return when all have ended well, `server` running meanwhile. Kills those that are left.

    Raises:
        ClusterError: One failed, or the server ended, or time is over.
    """
    give_up_at = time.monotonic() + timeout_s
    try:
        while any(worker.poll() is None for worker in workers):
            if failed := next((one for one in workers if one.poll()), None):
                raise ClusterError(failed.describe_end())
            if server is not None and server.poll() is not None:
                raise ClusterError(server.describe_end())
            if time.monotonic() > give_up_at:
                late = ", ".join(one.name for one in workers if one.poll() is None)
                raise ClusterError(f"no end of {late} within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        if failed := next((one for one in workers if one.poll()), None):
            raise ClusterError(failed.describe_end())
    finally:
        for worker in workers:
            worker.kill()
