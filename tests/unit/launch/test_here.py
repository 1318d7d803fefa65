"""What becomes of jobs that end too early."""

from __future__ import annotations

import pytest

from areal_hpc.errors import AgentError, ClusterError, RecipeError
from areal_hpc.launch.local_launcher import POLICY, count_other_cells, made_progress

KILLED, HEALTHY_S = 137, POLICY.healthy_s


@pytest.mark.parametrize("code", [KILLED, AgentError.exit_code])
def test_a_crash_must_follow_some_progress(code: int) -> None:
    assert POLICY.decide([code], 0) == "again"
    assert POLICY.decide([code], 1) == "fail"


def test_an_end_from_outside_may_come_to_nothing_a_few_times() -> None:
    assert POLICY.decide([ClusterError.exit_code], 2) == "again"
    assert POLICY.decide([ClusterError.exit_code], 3) == "fail"


def test_one_cell_of_several_can_be_done_without() -> None:
    assert POLICY.decide([KILLED], 1, is_dispensable=True) == "without"
    assert POLICY.decide([KILLED], 0, is_dispensable=True) == "again"


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
    found = made_progress(job, steps_taken=steps_taken, steps_left=steps_left, lived_s=lived_s)
    assert found is expected


def test_only_a_cell_of_training_stands_in_for_another() -> None:
    jobs = ["trainer", "cell-0", "cell-1", "evaluation"]
    assert [count_other_cells(job, jobs) for job in jobs] == [0, 1, 1, 0]
    assert count_other_cells("cell-0", ["trainer", "cell-0", "evaluation"]) == 0


@pytest.mark.parametrize("is_dispensable", [False, True])
def test_a_recipe_that_is_wrong_stays_wrong(is_dispensable: bool) -> None:
    decision = POLICY.decide([RecipeError.exit_code], 0, is_dispensable=is_dispensable)
    assert decision == "fail"
