"""The agent that a request names by a header or a parameter is recorded with its own history."""

from typing import Any

import pytest

from areal_hpc.session.tree import unpack_ids
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


def test_a_label_that_changes_within_a_conversation_splits_nothing(stage: Stage) -> None:
    _, key = stage.open_session()
    labels = [{"user": "1"}, {"user": "2", "prompt_cache_key": "a"}]
    for messages, label in zip((QUESTION, [*QUESTION, *turn("hello world")]), labels, strict=True):
        assert stage.chat(key, messages, **label).status_code == 200
    first, second = stage.await_journaled(key, 2)
    assert (first.agent_id, second.agent_id) == ("1", "a")
    assert second.parent_id == first.interaction_id
    assert first.ignored == second.ignored == []


@pytest.mark.parametrize("agent", ["a", "b"])
def test_a_raw_prompt_continues_its_own_agent_alone(agent: str, stage: Stage) -> None:
    _, key = stage.open_session()
    ids: list[int] = []
    for name in ("a", agent):
        body = {"prompt": [*ids, 5, 6, 7], "max_tokens": 4}
        answer = stage.post("/v1/completions", body, key, {"x-agent-id": name})
        assert answer.status_code == 200, answer.text
        asked = stage.await_journaled(key, 1)[0]
        ids = unpack_ids(asked.new_ids + asked.output_ids).tolist()
    first, second = stage.await_journaled(key, 2)
    assert second.parent_id == (first.interaction_id if agent == "a" else None)


@pytest.mark.parametrize("agent", ["a", "b"])
def test_a_prompt_is_counted_as_the_agent_s_call_has_it(agent: str, stage: Stage) -> None:
    """Agent `a` has an own reply's tokens in its history, which `b` tokenizes by their text."""
    stage.speak_in_letters()
    _, key = stage.open_session()
    headers = {"x-agent-id": agent}
    body = {"model": "m", "max_tokens": 9, "messages": QUESTION}
    assert stage.post("/v1/messages", body, key, {"x-agent-id": "a"}).status_code == 200
    body["messages"] = [*QUESTION, *turn("hello")]
    counted = stage.post("/v1/messages/count_tokens", body, key, headers).json()["input_tokens"]
    tokens = stage.post("/tokenize", {"messages": body["messages"]}, key, headers).json()["tokens"]
    assert stage.post("/v1/messages", body, key, headers).status_code == 200
    asked = stage.sglang.requests[-1]["input_ids"]
    assert (counted, tokens) == (len(asked), asked)
