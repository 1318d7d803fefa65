"""The OpenAI Agents SDK: a tool, and hand-offs, over chat completions and over responses."""

import pytest

from tests.integration.agents.theatre import (
    FORCED,
    INDIVIDUAL,
    Theatre,
    assert_a_tool_was_used,
)

SDK = "examples.frameworks.openai_agents"
INSTRUCTIONS = ["hand sums over", "then hand over", "check solutions"]
TRANSFERS = ["transfer_to_solver", "transfer_to_checker"]


@pytest.mark.parametrize("use_responses", [False, True], ids=["chat", "responses"])
def test_a_tool_and_a_team_are_recorded_turn_by_turn(theatre: Theatre, use_responses: bool) -> None:
    kwargs = {**FORCED, "use_responses": use_responses}
    tool, team = theatre.play(
        "frameworks",
        {"workflow": f"{SDK}.ToolAgent", "kwargs": kwargs},
        {"workflow": f"{SDK}.TeamAgent", "kwargs": kwargs, "export": INDIVIDUAL},
    )
    assert_a_tool_was_used(tool)
    prefix = "resp_" if use_responses else "chatcmpl-"
    assert all(turn.interaction_id.startswith(prefix) for turn in (*tool.turns, *team.turns))

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
    # ... and shares the reward of the last.
    assert [row.reward for row in team.rows] == [0.25, 0.5, 1.0]
    spoken = [turn.output_tokens for turn in team.turns]
    assert [team.trained(row) for row in team.rows] == spoken
