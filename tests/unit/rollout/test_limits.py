from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout.episodes.episode_spec import (
    EpisodeLimits,
    check_task_limits,
    resolve_limits,
)

ROLLOUT = RolloutConfig.model_validate({"limits": {"max_turns": 8}, "episode_timeout_s": 60.0})


def test_the_recipe_limits_an_episode_and_a_task_overrides_what_it_names() -> None:
    found = resolve_limits(ROLLOUT, {"question": "2+2"})
    assert found == EpisodeLimits(max_turns=8, max_tokens=0, timeout_s=60.0)
    own = resolve_limits(ROLLOUT, {"limits": {"max_tokens": 100, "timeout_s": 5}})
    assert own == EpisodeLimits(max_turns=8, max_tokens=100, timeout_s=5.0)


@pytest.mark.parametrize("limits", [3, {"max_turn": 1}, {"max_turns": -1}, {"timeout_s": 0}])
def test_limits_of_a_task_that_cannot_be_read_are_refused_before_any_episode(limits: Any) -> None:
    said = r"(?s)cannot be read.*give any of max_turns, max_tokens, timeout_s"
    with pytest.raises(RecipeError, match=said):
        check_task_limits(ROLLOUT, 3600.0, {"limits": limits})


def test_limits_that_the_session_cannot_keep_are_refused_and_others_let_through() -> None:
    said = "session_timeout_s=3600 is less than the 3900 s that 3 tries"
    with pytest.raises(RecipeError, match=said):
        check_task_limits(ROLLOUT, 3600.0, {"limits": {"timeout_s": 1300}})
    check_task_limits(ROLLOUT, 3600.0, {"limits": {"timeout_s": 1200}})
    check_task_limits(ROLLOUT, 1.0, {"question": "2+2"})
