"""An online run, whole: programs elsewhere play its tickets, and it trains on what they did."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from areal_hpc.rundir.jsonl import read_readable_records
from examples.online.chat import chat
from tests.support.small_run import SmallRun, await_none_left, started_from
from tests.support.sums import is_right

pytestmark = pytest.mark.timeout(400)

PROGRAMS = 8
STEPS = 2
GROUPS = 4


def come_and_go(run_dir: Path, is_over: threading.Event) -> int:
    """A person who talks again and again; how many talks ended with a reward."""
    rewarded = 0
    while not is_over.is_set():
        with suppress(httpx.TransportError):  # the proxy comes and goes with the run
            if chat(run_dir, judged, max_tokens=48):
                rewarded += 1
                continue
        time.sleep(0.2)
    return rewarded


def judged(said: str, task: dict[str, Any]) -> str:
    """What a user who can add types."""
    return "y" if is_right(said, task) else "n"


def test_an_online_run_trains_on_what_programs_do(model: Path, tmp_path: Path) -> None:
    run = SmallRun(
        tmp_path / "runs",
        *started_from(model),
        *("rollout.workflow=''", "rollout.agent.mode=online", "valid_dataset=null"),
        *(f"trainer.total_steps={STEPS}", "trainer.checkpoint_every_steps=1"),
    )
    is_over = threading.Event()
    with ThreadPoolExecutor(PROGRAMS) as pool:
        talks = [pool.submit(come_and_go, run.paths.root, is_over) for _ in range(PROGRAMS)]
        try:
            run.finish()
        finally:
            is_over.set()
    await_none_left(run, 20.0)
    trained = [row for row in read_readable_records(run.paths.metrics) if row["step"] > 0]
    assert [row["step"] for row in trained] == [*range(1, STEPS + 1)]
    assert all(row["tokens/trained"] > 0 for row in trained)
    assert sum(talk.result() for talk in talks) >= STEPS * GROUPS * 4
    assert run.audited() == f"trained_once={STEPS * GROUPS} duplicates=0 lost=0 open=0"
