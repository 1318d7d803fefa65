"""A run that falls apart is no success, though every step of it is trained."""

from pathlib import Path

import pytest

from areal_hpc.metrics.step_metrics import read_metrics
from tests.support.commands import exit_code_of
from tests.support.run_files import events_of
from tests.support.small_run import SmallRun, started_from

pytestmark = pytest.mark.timeout(400)


def test_a_learning_rate_of_1000_is_a_failure_once_three_steps_taught_nothing(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = SmallRun(
        tmp_path,
        *started_from(model),
        "rollout.workflow=tests.support.sums.VarietyAgent",
        "valid_dataset=null",
        "trainer.optimizer.lr=1000",
        "trainer.total_steps=5",
        "trainer.checkpoint_every_steps=5",
    )
    run.finish()
    rows = read_metrics(run.paths.metrics)
    norms = {row["step"]: row["grad_norm"] for row in rows if row.get("episodes")}
    # With the initial weights lost beside such steps, every sample of a task is the same reply.
    assert norms.pop(1) > 0 == sum(norms.values())
    assert "failure  steps 2 to 4 taught nothing" in run.said()
    failures = [event for event in events_of(run.paths, "alert") if event["level"] == "failure"]
    # Whether the reward fell enough beside its spread depends on the few groups of the first step.
    assert {"no_signal"} <= {event["rule"] for event in failures} <= {"no_signal", "reward_drop"}
    for command in ("status", "why"):
        assert exit_code_of(command, run.paths.root) == 1
        assert "taught nothing" in capfd.readouterr().out
