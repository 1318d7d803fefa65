"""Two cells that share a job: what strikes one of them is no matter of the other."""

import signal
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from areal_hpc.jobs.requeue import release_jobs_held_while_idle
from areal_hpc.rundir.jobs import CellSpec, LaunchFile, ProcessSpec
from tests.slurm.operated import OperatedRun
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.devclusters import Devcluster
from tests.support.process_commands import command_of

CELLS = ("cell-0", "cell-1")
JOB = "cells-0-1"
SAFE = ("--partition=priority", "--requeue", "--nodes=2")


@dataclass
class SharedJob(SupervisedJob):
    """A job whose cells have a driver each that does a thing of `job_actors.py`."""

    restarts_of_driver: int = 0

    def launch(self, function: str, tasks: int = 1, **slurm: object) -> LaunchFile:
        launch = super().launch("", tasks, **slurm)
        cells = []
        for name, does in zip(CELLS, function.split(), strict=True):
            config = launch.job.processes[0].config | {"file": str(self.root / f"{name}.txt")}
            driver = ProcessSpec(
                *("driver", "agents", f"tests.slurm.job_actors:{does}", config),
                ends_job=True,
                restarts=self.restarts_of_driver,
            )
            cells.append(CellSpec(name, [driver]))
        job = msgspec.structs.replace(launch.job, processes=[], cells=cells)
        return msgspec.structs.replace(launch, job=job)

    def words_of(self, cell: str) -> list[str]:
        """What a cell's driver wrote, places apart."""
        path = self.root / f"{cell}.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" at ")[0] for line in lines]

    def awaits_cells(self, *words: list[str]) -> None:
        """Return once the cells have written this."""
        self.awaits(lambda: [self.words_of(cell) for cell in CELLS] == list(words))

    def kill_driver(self, cell: str) -> None:
        config = str(self.run.job(cell).process_config("driver"))
        (driver,) = [one for one in psutil.process_iter() if config in command_of(one)]
        driver.kill()

    def list_events(self, name: str) -> list[dict[str, object]]:
        return [row for row in self.events() if row["event"] == name]


def test_a_killed_process_of_one_cell_is_started_again_beside_the_other(
    cluster: Devcluster, tmp_path: Path
) -> None:
    job = SharedJob(cluster, tmp_path / "run", JOB, restarts_of_driver=3)
    job.submit("steady steady", *SAFE, tasks=2)
    job.awaits_cells(["began 1"], ["began 1"])
    job.kill_driver("cell-1")
    job.awaits_cells(["began 1"], ["began 1", "began 1"])
    (died,) = job.list_events("process_exited")
    assert (died["role"], died["exit_code"]) == ("cell-1", 128 + signal.SIGKILL)
    nodes = [
        (job.run.log_dir(1) / cell / "restart_00" / "driver.log").read_text().split()[1]
        for cell in CELLS
    ]
    assert len(set(nodes)) == 2, "each cell has a node of its own"
    job.let_go()
    job.awaits_state("COMPLETED")
    assert (job.starts(), job.restarts()) == (1, 0)
    assert job.words_of("cell-0") == ["began 1", "done"]


@pytest.mark.thorough
def test_a_cell_that_gives_up_stays_away_until_the_next_start_of_its_job(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = OperatedRun.make(cluster, tmp_path, "shared")
    run.submit("trainer", "steady", *SAFE[:2])
    job = SharedJob(cluster, run.paths.root, JOB)
    job.submit("steady crash", *SAFE, tasks=2)
    # The first start got further, the second may have had bad luck, the third is one too many.
    job.awaits_cells(["began 1"], ["crashed 1"] * 3)
    job.awaits(lambda: len(job.list_events("cell_gave_up")) == 1)
    assert len(job.list_events("cell_restarted")) == 2
    assert "running, short of cells" in (shown := run.command("status"))
    assert f"cell-1 of {JOB} gave up (driver: exit code 139)" in shown
    why = run.command("why", code=1)
    assert f"short of cells: cell-1 of {JOB} (job {job.job_id}) gave up" in why
    assert f"scontrol requeue {job.job_id} starts all cells of that job again" in why
    assert "cell-0/driver@" in run.command("logs", JOB)
    assert "cell-1/driver@" in run.command("logs", JOB)
    job.cluster.slurm("scancel", "--signal=TERM", job.job_id)
    job.awaits(lambda: len(job.words_of("cell-0")) == 3 and len(job.words_of("cell-1")) > 3)
    assert job.words_of("cell-0") == ["began 1", "saved 0", "began 2"]
    assert job.words_of("cell-1")[3] == "crashed 2"
    (requeued,) = job.list_events("job_requeued")
    assert requeued["reason"] == "stopped by a signal"
    assert job.restarts() == 1
    run.command("cancel")


def test_a_job_ends_when_all_of_its_cells_have_given_up(
    cluster: Devcluster, tmp_path: Path
) -> None:
    job = SharedJob(cluster, tmp_path / "run", JOB)
    job.submit("refuse refuse", *SAFE, tasks=2)
    job.awaits_state("FAILED")
    assert job.outcome().gave_up
    assert [job.words_of(cell) for cell in CELLS] == [["refused"]] * 2
    assert {row["role"] for row in job.list_events("cell_gave_up")} == {*CELLS}
    assert job.starts() == 1


def test_a_job_is_held_once_all_of_its_cells_are_idle(
    cluster: Devcluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    job = SharedJob(cluster, tmp_path / "run", JOB)
    job.submit("idle_once idle_when_told", *SAFE, tasks=2)
    job.awaits(lambda: len(job.words_of("cell-0")) >= 3)
    assert job.words_of("cell-1") == ["began 1"], "one that has work is left alone"
    assert job.restarts() == 0
    job.let_go()
    job.awaits(lambda: " Reason=job_requeued_in_held_state " in job.shown())
    job.awaits(lambda: release_jobs_held_while_idle(job.run.jobs_dir) == [JOB])
    job.awaits_state("COMPLETED")
