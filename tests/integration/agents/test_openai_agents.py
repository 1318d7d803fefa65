"""The OpenAI Agents SDK: a tool, and hand-offs, over chat completions and over responses."""

from tests.integration.agents.theatre import (
    FORCED,
    INDIVIDUAL,
    Scene,
    Theatre,
    assert_a_tool_was_used,
)

SDK = "examples.frameworks.openai_agents"
INSTRUCTIONS = ["hand sums over", "then hand over", "check solutions"]
TRANSFERS = ["transfer_to_solver", "transfer_to_checker"]


def test_tools_and_teams_are_recorded_turn_by_turn_in_both_dialects(theatre: Theatre) -> None:
    # The SDK takes a response that reached its limit for an error, so the limit is far away.
    episodes = [
        {
            "workflow": f"{SDK}.{agent}",
            "kwargs": {**FORCED, "use_responses": use_responses},
            "max_new_tokens": 3000,
            "export": export,
        }
        for agent, export in (("ToolAgent", {}), ("TeamAgent", INDIVIDUAL))
        for use_responses in (False, True)
    ]
    scenes = theatre.play("frameworks", *episodes)
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
    # ... and shares the reward of the last.
    assert [row.reward for row in team.rows] == [0.25, 0.5, 1.0]
    spoken = [turn.output_tokens for turn in team.turns]
    assert [team.trained(row) for row in team.rows] == spoken
