"""Which jobs are submitted again."""

from __future__ import annotations

import pytest

from areal_hpc.errors import AgentError, ClusterError, RecipeError
from areal_hpc.launch import FRUITLESS_ENDS, is_worth_another_try

KILLED = 137


@pytest.mark.parametrize("code", [KILLED, AgentError.exit_code])
def test_a_crash_must_follow_some_progress(code: int) -> None:
    assert is_worth_another_try(code, fruitless=0)
    assert not is_worth_another_try(code, fruitless=1)


def test_an_end_from_outside_may_come_to_nothing_a_few_times() -> None:
    assert is_worth_another_try(ClusterError.exit_code, FRUITLESS_ENDS)
    assert not is_worth_another_try(ClusterError.exit_code, FRUITLESS_ENDS + 1)


def test_a_recipe_that_is_wrong_stays_wrong() -> None:
    assert not is_worth_another_try(RecipeError.exit_code, fruitless=0)
