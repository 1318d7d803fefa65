"""A run in an allocation of the user's: a step that dies, and Ctrl-C."""

from pathlib import Path

from tests.support.devclusters import Devcluster
from tests.support.held_run import NO_END, ONE_NODE, HeldRun


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
    assert "sft ended without an exit status; this job is started again" in run.said()
    run.await_nothing_left()
