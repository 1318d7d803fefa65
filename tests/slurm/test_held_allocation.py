"""A run in allocations that somebody holds: which GPUs its steps get, and what ends it."""

from pathlib import Path

import pytest

from areal_hpc.rundir.checkpoints import find_latest
from tests.support.commands import areal_hpc, audit_of
from tests.support.devclusters import Devcluster
from tests.support.held_run import NO_END, ONE_NODE, TWO_NODES, HeldRun


@pytest.mark.timeout(300)
def test_a_run_saves_before_the_time_limit_and_goes_on_in_another_allocation(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = HeldRun(cluster, tmp_path / "runs")
    with run.hold(*TWO_NODES, f"trainer.total_steps={NO_END}"):
        run.await_training(1)
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

    last, saved = run.read_steps()[-1], find_latest(run.paths.checkpoints_dir)
    assert saved is not None
    assert saved.state.step == last  # no step is taken twice
    with run.hold(*ONE_NODE, f"trainer.total_steps={last + 1}"):
        run.await_step("cell-0.2")
        gpus = {job: run.get_gpus(job) for job in ("trainer", "cell-0")}
        assert gpus == {"trainer": "0", "cell-0": "1"}
        assert run.end(200) == 0, run.said()
    assert run.read_steps() == list(range(1, last + 2))
    assert f"trained_once={4 * (last + 1)} duplicates=0 lost=0" in audit_of(run.paths.root)
    run.await_nothing_left()


def test_a_step_that_is_cancelled_starts_again_and_ctrl_c_leaves_nothing(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = HeldRun(cluster, tmp_path / "runs", f"sft.total_steps={NO_END}")
    with run.hold(*ONE_NODE):
        run.await_step("sft.1")
        assert run.get_gpus("sft") == "0"
        run.cancel_step("sft.1")
        run.await_step("sft.2")
        assert run.get_gpus("sft") == "0"
        run.press_ctrl_c()
        assert run.end(60) == 130, run.said()
    assert "sft ended without an exit status; this job is started again" in run.said()
    run.await_nothing_left()
