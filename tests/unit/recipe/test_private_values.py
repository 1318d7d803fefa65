"""Values that may be secrets are hidden, however an override writes them."""

import pytest

from areal_hpc.recipe.loading import flatten_keys, parse_overrides
from areal_hpc.recipe.private_values import hide_private_arguments

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


def test_a_recorded_command_has_the_rest_of_its_overrides() -> None:
    command = ["areal-hpc", "run", "variables.yaml", "seed=1", "rollout={n_samples: 4}", "--fresh"]
    assert list(hide_private_arguments(command)) == command
