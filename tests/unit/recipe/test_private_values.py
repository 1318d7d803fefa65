"""Values that may be secrets are hidden, however an override writes them."""

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.keys import flatten_keys
from areal_hpc.recipe.loading import load_recipe, parse_overrides
from areal_hpc.recipe.private_values import hide_private_arguments
from tests.support.environments import CHECKOUT

SECRET = "sk-1"


@pytest.mark.parametrize(
    "override",
    [
        f"cluster.agents.variables.API_KEY={SECRET}",
        f"cluster.agents.variables={{API_KEY: {SECRET}}}",
        f"cluster.agents={{variables: {{API_KEY: {SECRET}}}}}",
        f"cluster={{agents: {{variables: {{API_KEY: {SECRET}}}}}}}",
        f"cluster.agents[variables][API_KEY]={SECRET}",
        f"cluster[agents][variables]={{API_KEY: {SECRET}}}",
        f"rollout={{workflow_kwargs: {{key: {SECRET}}}}}",
        f'rollout={{"workflow_kwargs": {{key: {SECRET}}}}}',
        f"rollout[workflow_kwargs].key={SECRET}",
    ],
)
def test_a_recorded_command_has_no_secret_of_its_overrides(override: str) -> None:
    assert SECRET in flatten_keys(parse_overrides([override])).values(), "it is an override"
    (shown,) = hide_private_arguments([override])
    assert SECRET not in shown
    assert shown.startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    "overrides",
    [
        [f"rollout.workflow_kwargs={SECRET}"],
        # Found by the whole section, which is told.
        ["rollout.failed_episodes={reward: .inf}", f"rollout.workflow_kwargs.token={SECRET}"],
        [f"cluster.agents.variables={{A: [{SECRET}]}}"],
    ],
)
def test_an_error_of_a_recipe_tells_no_secret(overrides: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", overrides)
    assert SECRET not in str(refused.value)
    assert "got " in str(refused.value)


def test_a_recorded_command_has_the_rest_of_its_overrides() -> None:
    command = ["areal-hpc", "run", "variables.yaml", "seed=1", "rollout={n_samples: 4}", "--fresh"]
    assert list(hide_private_arguments(command)) == command
