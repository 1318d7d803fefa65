"""kill -9 of one rank of two: all start again within the job, from the last checkpoint.

Writes `benchmarks/results/rank_kill.json`.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.weight_version import WeightVersion
from tests.acceptance.slurm_run import SlurmRun
from tests.support.commands import areal_hpc, said_by
from tests.support.devclusters import Devcluster, devcluster
from tests.support.killed_run import PARTIES, KilledRun
from tests.support.process_commands import alive, command_of, find_processes
from tests.support.results import add_results
from tests.support.run_files import events_of, logs_of, published_weights
from tests.support.small_run import await_none_left
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(1800)

KILLS = 6
STEPS = 400
STEPS_BETWEEN = 5
"""Steps between two checkpoints, as on Slurm: each death follows some progress."""
MOST_S = 15.0
KILLED = 128 + 9
RECOVERY_TIMEOUT_S = 120.0


class RankKiller:
    """Killer of a run's ranks, on any node of this machine."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def ranks(self) -> dict[int, psutil.Process]:
        processes = {}
        for process in find_processes(PARTIES["trainer"], self._paths.root):
            words = command_of(process)
            if PARTIES["trainer"] in words:  # it lives yet
                config = Path(words[words.index(PARTIES["trainer"]) + 1])
                processes[int(config.stem.rpartition("-")[2])] = process
        return processes

    def version(self) -> WeightVersion:
        return published_weights(self._paths)[-1][1]

    def await_steps(self, count: int) -> None:
        last = self.version().step + count
        wait_for(lambda: self.version().step >= last, RECOVERY_TIMEOUT_S)

    def kill(self, rank: int) -> float:
        """Kill one rank; return the seconds until the next step after the restart."""
        old, before = self.ranks(), self.version()
        struck_at = time.time()
        old[rank].kill()

        def list_steps() -> list[float]:
            published = published_weights(self._paths, struck_at)
            new = [(at, its.step) for at, its, _ in published if its.generation > before.generation]
            return [at for at, step in new if step > new[0][1]]

        wait_for(list_steps, RECOVERY_TIMEOUT_S, lambda: logs_of(self._paths))
        assert not alive(old.values())
        return list_steps()[0] - struck_at


def record(name: str, kills_s: Sequence[float]) -> list[float]:
    totals = sorted(round(kill_s, 1) for kill_s in kills_s)
    add_results("rank_kill", **{name: totals})
    return totals


def kill_in_turn(killer: RankKiller) -> list[float]:
    kills = []
    for number in range(KILLS):
        killer.await_steps(STEPS_BETWEEN)
        kills.append(killer.kill(number % 2))
    return kills


def test_a_rank_that_is_killed_costs_little_and_nothing_is_lost(
    model: Path, tmp_path: Path
) -> None:
    run = KilledRun(
        tmp_path,
        model,
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
    totals = record("within the job, on this machine", kills)
    assert totals[-1] <= MOST_S, kills


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "cluster", "--nodes=4") as cluster:
        yield cluster
        cluster.cancel_all()


def test_on_slurm_it_costs_no_more_over_two_nodes(cluster: Devcluster, tmp_path: Path) -> None:
    run = SlurmRun(cluster, tmp_path)
    run.submit()
    run.await_true(lambda: bool(run.published()))
    assert len(run.nodes("trainer")) == 2
    kills = kill_in_turn(RankKiller(run.paths))
    assert (run.starts("trainer"), run.restarts("trainer")) == (1, 0)
    assert "killed by SIGKILL" in run.sighting("trainer").why
    run.audited()
    totals = record("within the job, on two nodes of Slurm", kills)
    assert totals[-1] <= MOST_S, kills
