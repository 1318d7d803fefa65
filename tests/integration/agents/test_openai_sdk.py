"""The OpenAI SDK: awaited, streamed, and blocking in a process of its own."""

from tests.integration.agents.theatre import FORCED, Theatre, assert_a_tool_was_used

SDK = "examples.frameworks.openai_sdk"


def test_every_way_to_call_is_recorded_alike(theatre: Theatre) -> None:
    tool, streamed, blocking = theatre.play(
        "agents",
        {"workflow": f"{SDK}.ToolAgent", "kwargs": FORCED},
        {"workflow": f"{SDK}.StreamingAgent"},
        {"workflow": f"{SDK}.BlockingAgent", "subproc": True},
    )
    assert_a_tool_was_used(tool)
    for scene in (streamed, blocking):
        (turn,) = scene.turns
        assert [message["role"] for message in turn.new_messages] == ["user"]
        (row,) = scene.rows
        assert (row.reward, scene.trained(row)) == (1.0, turn.output_tokens)
    assert streamed.heard == [streamed.said(streamed.turns[0], skip_special_tokens=True)]
