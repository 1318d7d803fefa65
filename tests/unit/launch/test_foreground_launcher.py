"""What becomes of jobs that end too early."""

import pytest

from areal_hpc.errors import AgentError, ClusterError, RecipeError
from areal_hpc.launch.foreground_launcher import (
    LOCAL_RESTART_POLICY,
    job_made_progress,
)

KILLED, HEALTHY_S = 137, LOCAL_RESTART_POLICY.healthy_s


@pytest.mark.parametrize(
    ("code", "failures", "decision", "of_one_of_several"),
    [
        (KILLED, 0, "restart", "restart"),
        (KILLED, 1, "fail", "continue_without"),
        (AgentError.exit_code, 0, "fail", "fail"),
        (ClusterError.exit_code, 2, "restart", "restart"),
        (ClusterError.exit_code, 3, "fail", "continue_without"),
        (RecipeError.exit_code, 0, "fail", "fail"),
    ],
)
def test_a_crash_must_follow_some_progress_and_one_cell_of_several_can_be_done_without(
    code: int, failures: int, decision: str, of_one_of_several: str
) -> None:
    assert LOCAL_RESTART_POLICY.decide([code], failures) == decision
    assert LOCAL_RESTART_POLICY.decide([code], failures, is_dispensable=True) == of_one_of_several


@pytest.mark.parametrize(
    ("job", "steps_taken", "steps_left", "lived_s", "expected"),
    [
        ("trainer", 1, 5, 1.0, True),
        ("trainer", 0, 5, HEALTHY_S, False),
        ("cell-0", 0, 5, HEALTHY_S, True),
        ("cell-0", 0, 5, 1.0, False),
        ("evaluation", 0, 5, 1.0, True),
        ("evaluation", 0, 0, 1.0, False),
        ("evaluation", 0, 0, HEALTHY_S, True),
    ],
)
def test_a_job_was_of_use_if_the_run_got_further_or_could_do_without_it(
    job: str, steps_taken: int, steps_left: int, lived_s: float, expected: bool
) -> None:
    found = job_made_progress(job, steps_taken=steps_taken, steps_left=steps_left, lived_s=lived_s)
    assert found is expected
