"""The agents ready to use, each in the environment of its framework, before the real model."""

import re
from typing import Any

import pytest

from areal_hpc.areal.config.conversions import map_areal_module
from areal_hpc.errors import RecipeError
from areal_hpc.reward.gsm8k import gsm8k_reward_fn
from areal_hpc.rollout.agent import load_agent
from tests.integration.agents.theatre import FORCED, INDIVIDUAL, Scene, Theatre
from tests.support.documents import blocks

QUESTION = {"messages": [{"role": "user", "content": "What is 1 + 2?"}]}
THREE: dict[str, Any] = {"extra_body": {"regex": r"\\boxed\{3\}"}}
"""The model can say nothing else."""
READY = "areal_hpc.areal.workflow"


def episode(agent: str, answer: str = "3", **kwargs: Any) -> dict[str, Any]:
    return {
        "workflow": f"{READY}.{agent}",
        "data": {**QUESTION, "answer": answer},
        "kwargs": kwargs,
        "export": INDIVIDUAL,
        "max_new_tokens": 1000,
    }


def test_agents_on_the_openai_sdk_are_judged(theatre: Theatre) -> None:
    once, again, tool = theatre.play(
        "main",
        episode("openai.math_agent.MathAgent", **THREE),
        episode("openai.math_agent.MultiTurnMathAgent", "4", max_turns=2, **THREE),
        episode("openai.math_agent.MathToolAgent", first_request=FORCED),
    )
    assert (once.heard, once.rewards) == (["\\boxed{3}"], [1.0])
    assert len(again.turns) == 2
    assert again.turns[1].parent_id == again.turns[0].interaction_id
    assert_the_calculator_was_used(tool)


def test_agents_of_frameworks_are_judged(theatre: Theatre) -> None:
    team, calculator = "openai_agent.math_agent.MathAgent", "forced_frameworks.ForcedCalculator"
    scenes = theatre.play(
        "main",
        episode("langchain.math_agent.MathAgent", **THREE),
        episode("anthropic.math_agent.MathAgent", max_tokens=60),  # no grammar in this dialect
        episode(team, agent_builder_path="forced_frameworks.build_team"),
        episode(team, extra_body=THREE["extra_body"], tool_choice="none"),
        episode("langchain.math_agent.MathToolAgent") | {"workflow": calculator},
    )
    chat, messages, handed_over, alone, tool = scenes
    for scene in (chat, alone):
        assert (scene.heard, scene.rewards) == (["\\boxed{3}"], [1.0])
    (turn,) = messages.turns
    assert messages.heard == [messages.said(turn, skip_special_tokens=True)]
    assert messages.rewards == [gsm8k_reward_fn(None, messages.heard[0], None, None, "3")]
    first, second = handed_over.turns[:2]
    (call,) = first.reply["tool_calls"]
    assert call["function"]["name"].startswith("transfer_to_")
    assert "You get a problem solved." in handed_over.prompt(first)
    assert "You get a problem solved." not in handed_over.prompt(second)
    assert_the_calculator_was_used(tool)


def test_the_agent_of_camel_is_judged(theatre: Theatre) -> None:
    kwargs = {"tokenizer": str(theatre.stage.model_dir), **THREE}
    (scene,) = theatre.play("camel", episode("camel.math_agent.MathAgent", **kwargs))
    assert (scene.heard, scene.rewards) == (["\\boxed{3}"], [1.0])


def assert_the_calculator_was_used(scene: Scene) -> None:
    call, answer = scene.turns[0], scene.turns[-1]
    assert call.reply["tool_calls"][0]["function"]["name"] == "calculate"
    assert any(message["role"] == "tool" for message in answer.new_messages)
    assert scene.heard == [scene.said(answer, skip_special_tokens=True)]


def test_every_agent_that_the_guides_name_is_here() -> None:
    text = "\n".join(block.text for block in blocks() if block.document == "proxy_mode")
    named = re.findall(r"^workflow=(\S+)$", text, re.MULTILINE)
    refused = [path for path in named if path.removeprefix("areal.workflow.") not in PLAYED]
    assert len(refused) < len(named)
    for path in refused:
        with pytest.raises(RecipeError, match=r"there is no module .*\.openhands"):
            load_agent(map_areal_module(path), {}, ())


PLAYED = {
    "anthropic.math_agent.MathAgent",
    "langchain.math_agent.MathAgent",
    "langchain.math_agent.MathToolAgent",
    "openai.math_agent.MathAgent",
    "openai.math_agent.MathToolAgent",
}
"""Above."""
