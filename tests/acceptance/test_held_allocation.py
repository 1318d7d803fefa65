"""A run in allocations that somebody holds trains each ticket once, whatever ends its steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from tests.support.commands import areal_hpc, audit_of
from tests.support.devclusters import Devcluster, devcluster
from tests.support.held_run import NO_END, ONE_NODE, TWO_NODES, HeldRun


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "cluster", "--nodes=2") as found:
        yield found
        found.cancel_all()


@pytest.mark.timeout(1500)
def test_steps_that_die_a_time_limit_and_ctrl_c_cost_no_ticket(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = HeldRun(cluster, tmp_path / "runs")
    with run.hold(*ONE_NODE, f"trainer.total_steps={NO_END}"):
        run.await_training(1)
        gpus = {job: run.get_gpus(job) for job in ("trainer", "cell-0")}
        assert sorted(gpus.values()) == ["0", "1"]  # which step has which is up to Slurm
        for supervisor in run.find_supervisors("cell-0"):
            supervisor.kill()
        run.await_step("cell-0.2")
        assert run.get_gpus("cell-0") == gpus["cell-0"]
        run.await_training(len(run.read_steps()) + 2)
        run.press_ctrl_c()
        assert run.end(100) == 130, run.said()
    run.await_nothing_left()
    with run.hold(*TWO_NODES, f"trainer.total_steps={NO_END}"):
        run.await_training(len(run.read_steps()) + 1)
        note = run.read_note()
        nodes = {step.job: step.nodes for step in note.steps}
        assert nodes == {"trainer": ("n01",), "cell-0": ("n02",)}
        status = areal_hpc("status", run.paths.root, environ=cluster.environ)
        assert f"running in allocation {note.job_id}" in status.stdout
        run.shorten_time_limit()
        assert run.end(100) == 75, run.said()
    assert f"error: allocation {note.job_id} is close to its time limit" in run.said()
    run.await_nothing_left()
    assert f"the run was stopped: allocation {note.job_id} is close to its time" in run.why()
    last, saved = run.read_steps()[-1], find_latest_checkpoint(run.paths.checkpoints_dir)
    assert saved is not None
    assert saved.state.step == last  # no step is taken twice
    with run.hold(*TWO_NODES, f"trainer.total_steps={last + 20}"):
        run.await_training(len(run.read_steps()) + 1)
        run.cancel_step("trainer.3")
        assert run.end(300) == 0, run.said()
    for job in ("cell-0", "trainer"):
        assert f"{job} ended without an exit status; this job is started again" in run.said()
    assert f"trained_once={4 * (last + 20)} duplicates=0 lost=0" in audit_of(run.paths.root)
    run.await_nothing_left()


def test_an_allocation_that_is_cancelled_leaves_nothing_and_why_names_it(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = HeldRun(cluster, tmp_path / "runs", f"sft.total_steps={NO_END}")
    with run.hold(*ONE_NODE):
        run.await_step("sft.1")
        cluster.slurm("scancel", run.read_note().job_id)
        assert run.end(60) != 0, run.said()
    run.await_nothing_left()
    why = run.why()
    assert "the run was stopped" in why
    assert "was ended (Slurm says" in why or "stopped by SIG" in why
