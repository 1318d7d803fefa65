"""The agent that a request names by a header or a parameter is recorded with its own history."""

from typing import Any

import pytest

from tests.contract.proxy.talk import QUESTION, turn
from tests.support.proxy_stage import Stage


@pytest.mark.parametrize(
    ("headers", "params", "named"),
    [
        ({}, {}, ("", "")),
        ({"x-agent-id": "b", "x-parent-agent-id": "a"}, {"user": "u"}, ("b", "a")),
        ({"x-claude-code-agent-id": "b"}, {}, ("b", "")),
        ({"thread-id": "2", "x-codex-parent-thread-id": "1"}, {}, ("2", "1")),
        ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, {}, ("ses_2", "ses_1")),
        ({}, {"metadata": {"agent_id": "b", "parent_agent_id": "a"}}, ("b", "a")),
        ({}, {"prompt_cache_key": "thread-1", "user": "u"}, ("thread-1", "")),
        ({}, {"user": "u" * 1000}, ("u" * 128, "")),
    ],
)
def test_the_agent_that_a_request_names_is_recorded(
    headers: dict[str, str], params: dict[str, Any], named: tuple[str, str], stage: Stage
) -> None:
    _, key = stage.open_session()
    for messages, agent in (
        (QUESTION, headers),
        ([*QUESTION, *turn("hello world")], headers),
        ([*QUESTION, *turn("hello world")], {"x-agent-id": "another"}),
    ):
        answer = stage.http.post(
            f"{stage.url}/v1/chat/completions",
            json={"messages": messages, **params},
            headers={"authorization": f"Bearer {key}", **agent},
        )
        assert answer.status_code == 200, answer.text
    first, second, other = stage.await_journaled(key, 3)
    for call in (first, second):
        assert (call.agent_id, call.parent_agent_id) == named
    assert second.parent_id == first.interaction_id
    assert (other.agent_id, other.parent_id) == ("another", None)
