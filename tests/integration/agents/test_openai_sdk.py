"""The OpenAI SDK: awaited, streamed, and blocking in a process of its own."""

import pytest
from openai import NotFoundError

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


def test_responses_of_the_real_model_are_given_back_by_their_ids(theatre: Theatre) -> None:
    _, key = theatre.stage.open_session(max_new_tokens=40)
    with theatre.stage.client(key) as client:
        first = client.responses.create(model="default", input="What is 1 + 2?")
        with client.responses.stream(
            model="default", input="And 3?", previous_response_id=first.id
        ) as stream:
            stream.until_done()
            second = stream.get_final_response()
        assert client.responses.retrieve(first.id) == first
        found = client.responses.retrieve(second.id)
        assert (found.output_text, found.usage) == (second.output_text, second.usage)
        assert found.previous_response_id == first.id
        client.responses.delete(first.id)
        with pytest.raises(NotFoundError, match=first.id):
            client.responses.retrieve(first.id)
