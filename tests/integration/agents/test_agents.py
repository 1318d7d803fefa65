"""Agents before the real model work: the examples, the ready ones, and the frameworks' own."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.reward.gsm8k import gsm8k_reward_fn
from tests.integration.agents.theatre import (
    FORCED,
    INDIVIDUAL,
    Scene,
    Theatre,
    assert_a_tool_was_used,
)
from tests.support.commands import run_program, said_by
from tests.support.environments import python_of

SUM = [{"role": "user", "content": "What is 1 + 2?"}]


def saying(pattern: str) -> dict[str, Any]:
    """Return arguments of an agent whose model can generate this pattern alone."""
    return {"extra_body": {"regex": pattern}}


def example(agent: str, task: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    data = {"messages": SUM, **task}
    return {"workflow": f"examples.{agent}", "data": data, "kwargs": kwargs}


def test_the_examples_are_played_and_rewarded(theatre: Theatre) -> None:
    tests = {"cases": [{"input": "", "output": "3"}]}
    three, program = saying(r"\\boxed\{3\}"), saying("```python\nprint\\(3\\)\n```")
    sorting_reward = {"reward": "examples.custom.sorting:sorting_reward"}
    math, sorted_numbers = "mathematics.agents.MathAgent", {"numbers": [3, 2, 1]}
    once, again, code, sorting = theatre.play(
        "main",
        example(math, {"answer": "3"}, **three),
        example("mathematics.agents.MultiTurnMathAgent", {"answer": "4"}, max_turns=2, **three),
        example("coding.agent.CodeAgent", {"tests": tests}, **program),
        example(math, sorted_numbers, **sorting_reward, **saying("1 3 2")),
    )
    assert (once.heard, once.rewards) == (["\\boxed{3}"], [1.0])
    assert again.heard == ["\\boxed{3}", "\\boxed{3}"]
    assert again.rewards == [0.0]
    assert again.turns[1].parent_id == again.turns[0].interaction_id
    first, second = code.turns
    assert "It ended with code 0:\n3\n" in second.new_messages[-1]["content"]
    assert second.parent_id == first.interaction_id
    assert code.rewards == [1.0]
    assert sorting.rewards == [round(1 / 3, 6)]


def calling(name: str, arguments: str) -> dict[str, Any]:
    """Return arguments of an agent whose model must call a tool with these arguments."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    literally = re.sub(r"[{}+]", r"\\\g<0>", call)
    return saying(f"<tool_call>\n{literally}\n</tool_call>")


def test_the_examples_with_tools_are_told_what_their_tools_found(theatre: Theatre) -> None:
    passages = [{"title": "Kiel", "text": "A port."}]
    search = partial(example, "search.agent.SearchAgent")
    computed, searched, own = theatre.play(
        "main",
        example(
            "tools.calculator.CalculatorAgent",
            {"answer": "3"},
            first_request=calling("calculate", '{"expression": "1 + 2"}'),
            **saying(r"\\boxed\{3\}"),
        ),
        search(
            {"answer": "SGLang"},
            first_request=calling("search", '{"query": "radix cache"}'),
            **saying("It is SGLang"),
        ),
        search(
            {"answer": "Kiel", "passages": passages},
            first_request=calling("search", '{"query": "a port"}'),
            **saying("Ulm"),
        ),
    )
    results = [assert_called_once(scene) for scene in (computed, searched, own)]
    assert results[0] == "3"
    assert "radix cache keeps the keys" in results[1]
    assert json.loads(results[2]) == passages
    assert [scene.rewards for scene in (computed, searched, own)] == [[1.0], [1.0], [0.0]]


def assert_called_once(scene: Scene) -> str:
    """Assert a single tool call, continued in one row, and return its result."""
    call, answer = scene.turns
    assert (answer.parent_id, answer.reuse) == (call.interaction_id, "reused")
    assert scene.heard == [scene.said(answer)]
    (row,) = scene.rows
    assert scene.trained(row) == call.num_output_tokens + answer.num_output_tokens
    (result,) = [message["content"] for message in answer.new_messages if message["role"] == "tool"]
    return str(result)


QUESTION = {"messages": [{"role": "user", "content": "What is 1 + 2?"}]}
THREE: dict[str, Any] = {"extra_body": {"regex": r"\\boxed\{3\}"}}
"""Options under which the model can only generate `3`."""
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


EXAMPLES = "examples.frameworks"
CALL_ONE = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
INSTRUCTIONS = ["hand sums over", "then hand over", "check solutions"]
TRANSFERS = ["transfer_to_solver", "transfer_to_checker"]


def test_the_openai_sdk_is_recorded_alike_awaited_streamed_and_blocking(theatre: Theatre) -> None:
    tool, streamed, blocking = theatre.play(
        "main",
        {"workflow": f"{EXAMPLES}.openai_sdk.ToolAgent", "kwargs": FORCED},
        {"workflow": f"{EXAMPLES}.openai_sdk.StreamingAgent"},
        {"workflow": f"{EXAMPLES}.openai_sdk.BlockingAgent", "subproc": True},
    )
    assert_a_tool_was_used(tool)
    for scene in (streamed, blocking):
        (turn,) = scene.turns
        assert [message["role"] for message in turn.new_messages] == ["user"]
        (row,) = scene.rows
        assert (row.reward, scene.trained(row)) == (1.0, turn.num_output_tokens)
    assert streamed.heard == [streamed.said(streamed.turns[0], skip_special_tokens=True)]


def test_tools_and_streams_of_the_anthropic_sdk_are_recorded(theatre: Theatre) -> None:
    tool, streamed = theatre.play(
        "main",
        {"workflow": f"{EXAMPLES}.anthropic_sdk.ToolAgent", "kwargs": CALL_ONE},
        {"workflow": f"{EXAMPLES}.anthropic_sdk.StreamingAgent"},
    )
    assert_a_tool_was_used(tool)
    (turn,) = streamed.turns
    assert [message["role"] for message in turn.new_messages] == ["system", "user"]
    assert turn.interaction_id.startswith("msg_")
    assert streamed.heard == [streamed.said(turn, skip_special_tokens=True)]
    assert streamed.rewards == [1.0]


def test_the_graph_of_langchain_s_agent_is_recorded(theatre: Theatre) -> None:
    (scene,) = theatre.play("main", {"workflow": "forced_frameworks.ForcedAgent"})
    assert_a_tool_was_used(scene)


def test_tools_and_teams_of_the_agents_sdk_are_recorded_in_both_dialects(theatre: Theatre) -> None:
    # The SDK takes a response that reached its limit for an error, so the limit is far away.
    episodes = [
        {
            "workflow": f"{EXAMPLES}.openai_agents.{agent}",
            "kwargs": {**FORCED, "use_responses": use_responses},
            "max_new_tokens": 3000,
            "export": export,
        }
        for agent, export in (("ToolAgent", {}), ("TeamAgent", INDIVIDUAL))
        for use_responses in (False, True)
    ]
    scenes = theatre.play("main", *episodes)
    for scene, prefix in zip(scenes, ["chatcmpl-", "resp_"] * 2, strict=True):
        assert all(turn.interaction_id.startswith(prefix) for turn in scene.turns)
    for tool in scenes[:2]:
        assert_a_tool_was_used(tool)
    for team in scenes[2:]:
        assert_a_team_handed_over(team)


def assert_a_team_handed_over(team: Scene) -> None:
    # Each agent of the team has instructions of its own, so each begins a conversation ...
    assert [turn.parent_id for turn in team.turns] == [None, None, None]
    for turn, instructions in zip(team.turns, INSTRUCTIONS, strict=True):
        assert instructions in team.prompt(turn)
    calls = [turn.reply.get("tool_calls", []) for turn in team.turns]
    names = [[call["function"]["name"] for call in calls_of_agent] for calls_of_agent in calls]
    assert names == [[TRANSFERS[0]], [TRANSFERS[1]], []]
    # ... that shows the messages of the agents before it ...
    for transfer in TRANSFERS:
        assert transfer in team.prompt(team.turns[2])
    assert team.heard == [team.said(team.turns[2], skip_special_tokens=True)]
    # ... and is followed by it, so that rewards pass back.
    assert team.rewards == [1.0] * 3
    replies = [turn.interaction_id for turn in team.turns]
    followers = [row.record.calls[-1].followers for row in team.rows]
    assert followers == [[replies[1]], [replies[2]], []]
    spoken = [turn.num_output_tokens for turn in team.turns]
    assert [team.trained(row) for row in team.rows] == spoken


def test_a_chat_agent_of_camel_and_its_tool_are_recorded(theatre: Theatre) -> None:
    kwargs = {"tokenizer": str(theatre.stage.model_dir)}
    (scene,) = theatre.play("camel", {"workflow": "forced_camel.ForcedAgent", "kwargs": kwargs})
    assert_a_tool_was_used(scene)


def test_a_chat_agent_of_camel_on_a_recording_client_exports_its_turns(theatre: Theatre) -> None:
    program = (python_of("camel"), Path(__file__).with_name("camel_client.py"))
    report = theatre.stage.paths.root / "client.json"
    said_by(run_program(*program, theatre.url, theatre.stage.model_dir, report))
    rows_and_texts = json.loads(report.read_text())
    first, second = rows_and_texts["rows"]
    assert [first["reward"], second["reward"]] == [0.5, 1.0]
    roles = [message["role"] for message in second["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    before = [*first["input_tokens"], *first["output_tokens"]]
    assert second["input_tokens"][: len(before)] == before
    for row, text in zip((first, second), rows_and_texts["heard"], strict=True):
        shown = theatre.encoder.decode(row["output_tokens"], skip_special_tokens=True)
        assert shown == text
