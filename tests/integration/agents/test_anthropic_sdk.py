"""The Anthropic SDK: tools, and streamed text."""

from tests.integration.agents.theatre import Theatre, assert_a_tool_was_used

SDK = "examples.frameworks.anthropic_sdk"
CALL_ONE = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


def test_tools_and_streams_are_recorded(theatre: Theatre) -> None:
    tool, streamed = theatre.play(
        "frameworks",
        {"workflow": f"{SDK}.ToolAgent", "kwargs": CALL_ONE},
        {"workflow": f"{SDK}.StreamingAgent"},
    )
    assert_a_tool_was_used(tool)
    (turn,) = streamed.turns
    assert [message["role"] for message in turn.new_messages] == ["system", "user"]
    assert turn.interaction_id.startswith("msg_")
    assert streamed.heard == [streamed.said(turn, skip_special_tokens=True)]
    assert [row.reward for row in streamed.rows] == [1.0]
