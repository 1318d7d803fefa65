import json

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.user_functions import load_user_function


@pytest.mark.parametrize(
    "dotted", ["json", "no.such.module:f", "json:nothing", "json:decoder", "antigravity.py:fly"]
)
def test_a_function_that_is_not_there_is_named_with_its_key(dotted: str) -> None:
    with pytest.raises(RecipeError, match=dotted) as caught:
        load_user_function(dotted, "rollout.curriculum")
    assert caught.value.problems[0].key == "rollout.curriculum"


def test_a_function_is_found() -> None:
    assert load_user_function("json:dumps", "rollout.curriculum") is json.dumps
