"""Replicas leave and come back while a run trains: 3, 2, 1, none, 3. Its trainer never restarts.

A cell leaves by the death of its processes. Writes `benchmarks/results/elastic.json`.
"""

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.killed_run import SLOW, KilledRun
from tests.support.process_commands import find_processes
from tests.support.results import write_results
from tests.support.run_files import events_of, trained_steps
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(1800)

CELLS = 3
STEPS = 400
STEPS_BETWEEN = 5
MOST_MEMBERSHIP_S = 5.0
NOTICED_S = 60.0
START_TIMEOUT_S = 300.0


class ElasticRun(KilledRun):
    """A run of three cells that can be sent away and called back."""

    def __init__(self, root: Path, model: Path) -> None:
        super().__init__(
            root,
            model,
            [],
            STEPS,
            f"inference.cells={CELLS}",
            *SLOW,
            "rollout.max_head_offpolicyness=1",
        )
        self._away: dict[int, psutil.Process] = {}

    def send_away(self, cell: int) -> None:
        """Kill all of a cell, and keep its supervisor from starting it anew."""
        supervisor = find_processes("submitit", self.paths.jobs_dir / f"cell-{cell}")[0]
        supervisor.suspend()
        for child in supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._away[cell] = supervisor

    def call_back(self) -> None:
        """Let every cell that was sent away start again."""
        for supervisor in self._away.values():
            supervisor.send_signal(signal.SIGCONT)
        self._away.clear()

    def published(self) -> list[dict[str, Any]]:
        return events_of(self.paths, "weights_published")

    def await_replicas(self, count: int, timeout_s: float) -> None:
        """Wait until `STEPS_BETWEEN` steps in a row were published to so many replicas."""

        def are_so_many() -> bool:
            last = self.published()[-STEPS_BETWEEN:]
            return [one["replicas"] for one in last] == [count] * STEPS_BETWEEN

        self.await_true(are_so_many, timeout_s)


def test_replicas_leave_and_join_and_the_trainer_stays(model: Path, tmp_path: Path) -> None:
    run = ElasticRun(tmp_path, model)
    seen: list[dict[str, Any]] = []
    run.start()
    run.await_replicas(CELLS, START_TIMEOUT_S)
    for left in (2, 1):
        began, known = time.time(), len(run.published())
        run.send_away(left)
        run.await_replicas(left, NOTICED_S)
        seen.append(change(run, f"{left + 1} -> {left}", began, known))
    began, known = time.time(), len(run.published())
    run.send_away(0)
    time.sleep(20.0)
    paused_at = trained_steps(run.paths)
    time.sleep(10.0)
    assert trained_steps(run.paths) == paused_at, "nothing can be trained on without a replica"
    run.call_back()
    run.await_replicas(CELLS, START_TIMEOUT_S)
    seen.append(change(run, "1 -> 0 -> 3", began, known))
    run.press_ctrl_c()
    await_none_left(run, 20.0)
    died = [one["process"] for one in events_of(run.paths, "process_exited")]
    assert not [process for process in died if "trainer" in process], died
    write_results("elastic", seen)
    assert max(one["longest_update_s"] for one in seen) <= MOST_MEMBERSHIP_S, seen


def change(run: ElasticRun, name: str, began: float, known: int) -> dict[str, Any]:
    """What publications say of one change of membership."""
    publications = run.published()[known:]
    return {
        "change": name,
        "seconds": round(time.time() - began, 1),
        "longest_update_s": max(sum(one["seconds"].values()) for one in publications),
        "failed_updates": sum(bool(one["failed"]) for one in publications),
        "publications": len(publications),
    }
