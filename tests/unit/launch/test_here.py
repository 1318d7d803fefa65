"""What becomes of jobs that end too early."""

from __future__ import annotations

import pytest

from areal_hpc.errors import AgentError, ClusterError, RecipeError
from areal_hpc.launch.here import (
    FRUITLESS_ENDS,
    HEALTHY_S,
    decide,
    has_been_of_use,
    stand_ins_of,
)

KILLED = 137


@pytest.mark.parametrize("code", [KILLED, AgentError.exit_code])
def test_a_crash_must_follow_some_progress(code: int) -> None:
    assert decide(code, fruitless=0, other_cells=0) == "again"
    assert decide(code, fruitless=1, other_cells=0) == "fail"


def test_an_end_from_outside_may_come_to_nothing_a_few_times() -> None:
    assert decide(ClusterError.exit_code, FRUITLESS_ENDS, other_cells=0) == "again"
    assert decide(ClusterError.exit_code, FRUITLESS_ENDS + 1, other_cells=0) == "fail"


def test_one_cell_of_several_can_be_done_without() -> None:
    assert decide(KILLED, fruitless=1, other_cells=1) == "without"
    assert decide(KILLED, fruitless=0, other_cells=1) == "again"


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
    found = has_been_of_use(job, steps_taken=steps_taken, steps_left=steps_left, lived_s=lived_s)
    assert found is expected


def test_only_a_cell_of_training_stands_in_for_another() -> None:
    jobs = ["trainer", "cell-0", "cell-1", "evaluation"]
    assert [stand_ins_of(job, jobs) for job in jobs] == [0, 1, 1, 0]
    assert stand_ins_of("cell-0", ["trainer", "cell-0", "evaluation"]) == 0


@pytest.mark.parametrize("other_cells", [0, 3])
def test_a_recipe_that_is_wrong_stays_wrong(other_cells: int) -> None:
    assert decide(RecipeError.exit_code, 0, other_cells) == "fail"
