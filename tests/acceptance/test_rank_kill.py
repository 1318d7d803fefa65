"""kill -9 of one rank of two: all start again within the job, from the last checkpoint.

Writes `benchmarks/results/rank_kill.json` and the table of `docs/operating.md`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.slurm_run import SlurmRun
from tests.support.commands import areal_hpc, said_by
from tests.support.devclusters import Devcluster, devcluster
from tests.support.killed_run import KilledRun, warmed_up_model
from tests.support.rank_kill import RankKiller, Seconds, record
from tests.support.run_files import events_of
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(1800)

KILLS = 6
STEPS = 400
STEPS_BETWEEN = 5
"""As many as there are between two checkpoints on Slurm: each death follows some progress."""
MOST_S = 15.0
KILLED = 128 + 9


def kill_in_turn(killer: RankKiller) -> list[Seconds]:
    """Kill one rank after the other, each some steps after the last."""
    kills = []
    for number in range(KILLS):
        killer.await_steps(STEPS_BETWEEN)
        kills.append(killer.kill(number % 2))
    return kills


def test_a_rank_that_is_killed_costs_little_and_nothing_is_lost(tmp_path: Path) -> None:
    run = KilledRun(
        tmp_path,
        warmed_up_model(tmp_path / "model"),
        [],
        STEPS,
        *("trainer.parallel.dp=2", "evaluation.every_steps=0", "alerts.off=[no_signal]"),
    )
    run.start()
    run.await_true(lambda: bool(events_of(run.paths, "weights_published")))
    killer = RankKiller(run.paths)
    kills = kill_in_turn(killer)
    why = said_by(areal_hpc("why", run.paths.root))
    run.press_ctrl_c()
    run.steps = killer.version().step + 2
    run.override(f"trainer.total_steps={run.steps}")
    run.finish()
    run.assert_complete()
    submitted = [event["job"] for event in events_of(run.paths, "job_submitted")]
    assert sorted(submitted) == ["cell-0", "cell-0", "trainer", "trainer"], "once a command"
    died = [event["exit_code"] for event in events_of(run.paths, "process_exited")]
    assert died == [KILLED] * KILLS, "the neighbor of a dead rank is not counted"
    assert "trainer of trainer ended: killed by SIGKILL" in why.splitlines()[0]
    await_none_left(run, 20.0)
    figures = record("within the job, on this machine", kills)
    assert figures["totals"][-1] <= MOST_S, kills


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "cluster", "--nodes=4") as found:
        yield found
        found.cancel_all()


def test_on_slurm_it_costs_no_more_over_two_nodes(cluster: Devcluster, tmp_path: Path) -> None:
    run = SlurmRun(cluster, tmp_path)
    run.submit()
    run.await_true(lambda: bool(run.published()))
    assert len(run.nodes("trainer")) == 2
    kills = kill_in_turn(RankKiller(run.paths))
    assert (run.starts("trainer"), run.restarts("trainer")) == (1, 0)
    assert "killed by SIGKILL" in run.sighting("trainer").why
    run.audited()
    figures = record("within the job, on two nodes of Slurm", kills)
    assert figures["totals"][-1] <= MOST_S, kills
