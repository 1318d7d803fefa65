"""Storage hangs for 65 s, then a cell's node is frozen for 70 s: no server is restarted.

The real stack, on a file system that is frozen as a whole: what a failover of a file server is to
its clients. Writes `benchmarks/results/freezes.json`.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.freezing import FreezableDisk, freezable_disk, freeze_job
from tests.support.killed_run import SLOW, KilledRun, random_model
from tests.support.results import write_results
from tests.support.run_files import events_of, trained_steps
from tests.support.small_run import await_none_left, interrupted_at_end

pytestmark = pytest.mark.timeout(1800)

STORAGE_HANGS_S, NODE_FROZEN_S = 65.0, 70.0
"""More than `inference.health_timeout_s`, after which a silent server is restarted."""
START_TIMEOUT_S = 300.0
GOES_ON_WITHIN_S = 120.0
STEPS_BETWEEN = 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FreezableDisk]:
    with freezable_disk(tmp_path) as found:
        yield found


def test_what_stands_still_with_its_storage_or_node_is_not_restarted(
    disk: FreezableDisk, tmp_path: Path
) -> None:
    run = KilledRun(disk.root, random_model(tmp_path / "model"), [], 10_000, *SLOW)

    def await_steps(count: int, within_s: float) -> float:
        """Seconds until so many more steps were trained."""
        began, goal = time.monotonic(), trained_steps(run.paths) + count
        run.await_true(lambda: trained_steps(run.paths) >= goal, within_s)
        return round(time.monotonic() - began, 1)

    with interrupted_at_end(run):
        run.start()
        await_steps(STEPS_BETWEEN, START_TIMEOUT_S)
        freezes: dict[str, tuple[float, Callable[[], object]]] = {
            "storage hung": (STORAGE_HANGS_S, lambda: disk.freeze(STORAGE_HANGS_S)),
            "node frozen": (
                NODE_FROZEN_S,
                lambda: freeze_job(run.paths.job("cell-0").root, NODE_FROZEN_S),
            ),
        }
        measured = {}
        for name, (seconds, freeze) in freezes.items():
            freeze()
            measured[name] = {
                "seconds": seconds,
                "seconds_to_next_step": await_steps(1, GOES_ON_WITHIN_S),
                "servers_restarted": len(events_of(run.paths, "replica_died")),
                "processes_restarted": len(events_of(run.paths, "process_exited")),
            }
            await_steps(STEPS_BETWEEN, GOES_ON_WITHIN_S)
        assert len(events_of(run.paths, "replica_ready")) == 1, run.said()
    run.steps = trained_steps(run.paths) + STEPS_BETWEEN
    run.override(f"trainer.total_steps={run.steps}")
    run.finish()
    verdict = run.assert_complete()
    await_none_left(run, 20.0)
    write_results("freezes", {"freezes": measured, "steps": run.steps, "audit": verdict})
    assert all(not one["servers_restarted"] for one in measured.values()), measured
    assert all(not one["processes_restarted"] for one in measured.values()), measured
