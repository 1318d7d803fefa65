"""What `rollout.agent` is where the recipe leaves it out, by workflow."""

from typing import Any

import pytest

from areal_hpc.recipe.sections.rollout import RolloutConfig

HARNESS_AGENT = "areal_hpc.agents.harness.harness_agent.HarnessAgent"


@pytest.mark.parametrize(
    ("given", "sampling", "auxiliary"),
    [
        ({"workflow": HARNESS_AGENT}, "recipe", "drop"),
        ({"workflow": HARNESS_AGENT, "agent": {"sampling": "agent"}}, "agent", "drop"),
        ({"workflow": HARNESS_AGENT, "agent": {"auxiliary": "keep"}}, "recipe", "keep"),
        ({"workflow": "my.Agent"}, "agent", "keep"),
        ({}, "agent", "keep"),
    ],
)
def test_a_harness_agent_has_defaults_of_its_own(
    given: dict[str, Any], sampling: str, auxiliary: str
) -> None:
    config = RolloutConfig.model_validate(given)
    assert (config.agent.sampling, config.agent.auxiliary) == (sampling, auxiliary)
    assert RolloutConfig.model_validate(config.model_dump()) == config
