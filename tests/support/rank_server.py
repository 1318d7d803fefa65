"""The tests' end of `replay_worker`."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT


@dataclass(frozen=True)
class TaskExit:
    """How the ranks of one scenario ended, and what they left."""

    codes: list[int]
    reports: list[dict[str, Any]]
    log: str


class RankServer:
    """Starts ranks on request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, paths: RunPaths, act: str, ranks: int = 1, **scenario: Any) -> TaskExit:
        request = {"run_dir": str(paths.root), "act": act, "ranks": ranks, "trainer": {}}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request | scenario) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        files = [paths.root / f"report.{rank}.json" for rank in range(ranks)]
        reports = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        return TaskExit(codes, reports, (paths.root / "ranks.log").read_text()[-6000:])

    def call(
        self, act: Callable[..., object], paths: RunPaths, ranks: int = 1, **scenario: Any
    ) -> TaskExit:
        """Have every rank call a function of a module with the scenario and the paths."""
        name = f"{act.__module__}:{act.__name__}"
        return self.run(paths, "inspect", ranks, inspect=name, **scenario)


@contextmanager
def rank_server(python: Path = Path(sys.executable)) -> Iterator[RankServer]:
    """A server that ends with the block."""
    with subprocess.Popen(
        [str(python), "-m", "tests.support.replay_worker"],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield RankServer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=scaled(30))
