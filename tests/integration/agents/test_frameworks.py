"""The frameworks of docs/agents.md: their versions, and that all they do is recorded."""

import json
from pathlib import Path

from tests.integration.agents.theatre import (
    FORCED,
    INDIVIDUAL,
    Scene,
    Theatre,
    assert_a_tool_was_used,
)
from tests.support.commands import run_program, said_by
from tests.support.environments import python_of

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
    names = [[call["function"]["name"] for call in made] for made in calls]
    assert names == [[TRANSFERS[0]], [TRANSFERS[1]], []]
    # ... that shows what the agents before it said ...
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
    said = json.loads(report.read_text())
    first, second = said["rows"]
    assert [first["reward"], second["reward"]] == [0.5, 1.0]
    roles = [message["role"] for message in second["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    before = [*first["input_tokens"], *first["output_tokens"]]
    assert second["input_tokens"][: len(before)] == before
    for row, heard in zip((first, second), said["heard"], strict=True):
        shown = theatre.encoder.decode(row["output_tokens"], skip_special_tokens=True)
        assert shown == heard
