"""An online run, whole: programs elsewhere play its tickets, and it trains on what they did."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_hpc.rundir.jsonl import read_lines
from examples.online.chat import chat
from examples.quickstart.task import verify
from tests.support.small_run import SmallRun, await_none_left, started_from

pytestmark = pytest.mark.timeout(400)

PROGRAMS = 8
STEPS = 2
GROUPS = 4


class Programs:
    """People who come again and again, each with a session of their own."""

    def __init__(self, run: SmallRun) -> None:
        self._paths = run.paths
        self._over = threading.Event()
        self.rewarded = 0
        """Sessions that ended with a reward."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let them come while the body runs."""
        with ThreadPoolExecutor(PROGRAMS) as pool:
            comings = [pool.submit(self._come_and_go) for _ in range(PROGRAMS)]
            try:
                yield
            finally:
                self._over.set()
        for coming in comings:
            coming.result()

    def _come_and_go(self) -> None:
        while not self._over.is_set():
            with suppress(httpx.TransportError):  # the proxy comes and goes with the run
                if self._play():
                    continue
            time.sleep(0.2)

    def _play(self) -> bool:
        """One conversation; False if no ticket waited."""
        has_talked = chat(self._paths.root, judged, max_tokens=48)
        self.rewarded += has_talked
        return has_talked


def judged(said: str, task: dict[str, Any]) -> str:
    """What a user who can add types."""
    return "y" if verify(said, task) else "n"


def test_an_online_run_trains_on_what_programs_do(model: Path, tmp_path: Path) -> None:
    run = SmallRun(
        tmp_path / "runs",
        *started_from(model),
        *("rollout.workflow=''", "rollout.agent.mode=online", "valid_dataset=null"),
        *(f"trainer.total_steps={STEPS}", "trainer.checkpoint_every_steps=1"),
    )
    programs = Programs(run)
    with programs.at_work():
        run.finish()
    await_none_left(run, 20.0)
    trained = [row for row in read_lines(run.paths.metrics) if row["step"] > 0]
    assert [row["step"] for row in trained] == [*range(1, STEPS + 1)]
    assert all(row["tokens/trained"] > 0 for row in trained)
    assert programs.rewarded >= STEPS * GROUPS * 4
    audited = run.audited()
    assert audited == f"trained_once={STEPS * GROUPS} duplicates=0 lost=0 open=0"
