"""The tests' end of `replay_worker`, which all workers of a run of the tests share."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.forked_workers import WORKER_VARIABLE

START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class TaskExit:
    """Exit codes, reports and log of the ranks of one scenario."""

    codes: list[int]
    reports: list[dict[str, Any]]
    log: str


class RankServer:
    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw")

    def run(self, paths: RunPaths, act: str, ranks: int = 1, **scenario: Any) -> TaskExit:
        request = {"run_dir": str(paths.root), "act": act, "ranks": ranks, "trainer": {}}
        self._lines.write(json.dumps(request | scenario) + "\n")
        self._lines.flush()
        codes = json.loads(self._lines.readline())
        files = [paths.root / f"report.{rank}.json" for rank in range(ranks)]
        reports = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        return TaskExit(codes, reports, (paths.root / "ranks.log").read_text()[-6000:])

    def call(
        self, act: Callable[..., object], paths: RunPaths, ranks: int = 1, **scenario: Any
    ) -> TaskExit:
        """Have every rank call a function of a module with the scenario and the paths."""
        name = f"{act.__module__}:{act.__name__}"
        return self.run(paths, "inspect", ranks, inspect=name, **scenario)

    def close(self) -> None:
        self._lines.close()


@contextmanager
def rank_server(folder: Path | None = None) -> Iterator[RankServer]:
    """A connection to the folder's server, which starts with the first and ends with the last."""
    if folder is None:
        with tempfile.TemporaryDirectory() as own, rank_server(Path(own)) as server:
            yield server
        return
    with (folder / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = _connect(folder / "ranks") or _start(folder / "ranks")
    try:
        yield server
    finally:
        server.close()


def _connect(address: Path) -> RankServer | None:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(address))
        except OSError:
            return None
        server = RankServer(connection)
    if server._lines.readline() == "ready\n":
        return server
    server.close()  # it was about to end
    return None


def _start(address: Path) -> RankServer:
    log = address.with_suffix(".log")
    with log.open("wb") as log_file:
        started = subprocess.run(
            [sys.executable, "-m", "tests.support.replay_worker", address],
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            timeout=scaled(START_TIMEOUT_S),
        )
    server = _connect(address)
    assert started.returncode == 0, log.read_text()
    assert server is not None, log.read_text()
    return server


def get_folder_of_all_workers(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    return base.parent if WORKER_VARIABLE in os.environ else base
