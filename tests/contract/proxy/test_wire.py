"""Frameworks find model names, ids, error shapes and liveness as their SDKs expect."""

import json
import threading
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError

from areal_hpc.proxy.http.event_stream import PING_AFTER_S
from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import LEAST, QUESTION, ask_least
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize("name", ["tiny", "my/served-model"])
def test_both_sdks_find_the_model_under_any_name(stage: Stage, key: str, name: str) -> None:
    with stage.client(key) as client:
        assert client.models.retrieve(name).id == name
        assert [model.id for model in client.models.list()] == ["tiny"]
    with stage.anthropic(key) as anthropic:
        assert anthropic.models.retrieve(name, extra_query={"beta": "true"}).display_name == name
        assert [model.id for model in anthropic.models.list()] == ["tiny"]


def get(stage: Stage, path: str, key: str, **headers: str) -> httpx.Response:
    return stage.http.get(f"{stage.url}{path}", headers={"x-api-key": key, **headers})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", LEAST)
def test_request_and_reply_share_their_id(stage: Stage, key: str, route: str, stream: bool) -> None:
    answer = ask_least(stage, key, route, stream=stream)
    assert answer.headers["x-request-id"] == answer.headers["request-id"]
    (interaction,) = stage.journaled(key)
    assert answer.headers["x-request-id"] == interaction.interaction_id


def test_requests_without_a_reply_have_ids_that_sdks_show(stage: Stage, key: str) -> None:
    ids = {get(stage, path, key).headers["x-request-id"] for path in ("/models", "/x", "/x")}
    assert len(ids) == 3
    with stage.client(key) as client, pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=QUESTION, extra_body={"echo": True})
    assert (refused.value.request_id or "").startswith("req_")
    with stage.client(key) as client:
        assert client.models.list()._request_id is not None


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/messages/batches", {}),
        ("/messages/nothing", {}),
        ("/v1/nothing", ANTHROPIC),
        ("/v1/messages", {}),
    ],
)
def test_errors_on_anthropics_routes_have_its_shape(
    stage: Stage, key: str, path: str, headers: dict[str, str]
) -> None:
    body = get(stage, path, key, **headers).json()
    assert body["type"] == "error"
    assert body["error"]["type"] in ("not_found_error", "invalid_request_error")
    assert get(stage, "/v1/nothing", key).json()["error"]["param"] is None
    refused = get(stage, "/v1/models", "wrong-key", **ANTHROPIC)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_tokens_of_a_response_are_counted_before_it_is_asked_for(stage: Stage, key: str) -> None:
    with stage.client(key) as client:
        counted = client.responses.input_tokens.count(model="m", input="hi", instructions="Add.")
        assert (counted.object, stage.sglang.requests) == ("response.input_tokens", [])
        response = client.responses.create(model="m", input="hi", instructions="Add.")
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def test_a_conversation_goes_on_by_references_to_what_was_said(stage: Stage) -> None:
    """Play three turns of a client that sends ids in place of replies, as Vercel's does."""
    letters = stage.speak_in_letters()
    _, key = stage.open_session()
    history: list[Any] = []
    with stage.client(key) as client:
        for question in ("What is 3 + 4?", "and 1?", "and 2?"):
            history.append({"role": "user", "content": question})
            response = client.responses.create(model="m", input=history)
            history += [{"type": "item_reference", "id": item.id} for item in response.output]
        del history[1]["type"]  # OpenAI's schema lets a client leave this out.
        history.append({"role": "user", "content": "and 3?"})
        client.responses.create(model="m", input=history)
        history[1]["id"] = "msg_00ff00"
        with pytest.raises(BadRequestError, match="send the item itself") as refused:
            client.responses.create(model="m", input=history)
    assert refused.value.param == "input[1].id"
    stage.assert_continued(letters)


def test_what_a_response_answered_is_listed(stage: Stage, key: str) -> None:
    with stage.client(key) as client:
        items: Any = [
            {"role": "user", "content": "add"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": {"x": 3}},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ]
        first = client.responses.create(model="m", input=items, instructions="Add.")
        last = client.responses.create(
            model="m", input="and 1?", instructions="Add.", previous_response_id=first.id
        )
        listed = [*client.responses.input_items.list(last.id, order="asc", limit=2)]
        newest = client.responses.input_items.list(last.id, limit=1)
        assert (len(newest.data), newest.has_more) == (1, True)
        assert newest.data[0] == listed[-1]
        with pytest.raises(NotFoundError, match="resp_nothing"):
            client.responses.input_items.list("resp_nothing")
        for wrong in ({"after": "msg_0"}, {"limit": 0}):
            with pytest.raises(BadRequestError) as refused:
                client.responses.input_items.list(last.id, **wrong)
            assert refused.value.param in wrong
    kinds = [item.type for item in listed]
    assert kinds == ["message", "function_call", "function_call_output", "message", "message"]
    assert json.loads(listed[1].to_dict()["arguments"]) == {"x": 3}
    assert listed[3].id == first.output[0].id
    assert len({item.id for item in listed}) == 5


def test_the_next_proxy_gives_no_response_and_goes_on_from_each(own_stage: Stage) -> None:
    _, key = own_stage.open_session(TicketRef(1, 0))
    with own_stage.client(key) as client:
        complete = client.responses.create(model="m", input="hi", instructions="Add.")
        unstored = client.responses.create(model="m", input="hi", store=False)
        own_stage.restart_proxy()
    with own_stage.client(key) as client:
        for gone in (complete, unstored):
            with pytest.raises(NotFoundError, match=gone.id):
                client.responses.retrieve(gone.id)
            later = client.responses.create(model="m", input="and?", previous_response_id=gone.id)
            assert client.responses.retrieve(later.id).id == later.id


OLD: list[Any] = [
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "function", "name": "f", "content": "7"},
]
NEW: list[Any] = [
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "name": "f", "content": "7"},
]


def test_older_calls_are_read_as_newer_ones(stage: Stage, key: str) -> None:
    letters = stage.speak_in_letters()
    stage.chat(key, [*QUESTION, *OLD])
    stage.chat(key, [*QUESTION, *NEW, {"role": "assistant", "content": "hello"}, *QUESTION])
    stage.assert_continued(letters)
    assert "<|im_start|>tool\n7" in stage.prompt_of(stage.sglang.requests[0])


@pytest.mark.parametrize("given", ['{"x": 3}', [3], "3 +", None, 2**70])
def test_arguments_that_are_no_object_are_kept(stage: Stage, key: str, given: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    history = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    assert stage.chat(key, history).status_code == 200
    items = [
        *QUESTION,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": given},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ]
    assert stage.post("/responses", {"input": items}, key).status_code == 200
    use = {"type": "tool_use", "id": "c", "name": "f", "input": given}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
    blocks = [
        *QUESTION,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert stage.post("/messages", {"messages": blocks}, key).status_code == 200
    recorded = [entry.new_messages[1]["tool_calls"][0] for entry in stage.journaled(key)]
    assert recorded[0]["function"]["arguments"] in (given, {"x": 3}, str(given), "")


def test_a_refusal_that_comes_back_is_text(stage: Stage, key: str) -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    history = [*QUESTION, {"role": "assistant", "content": [part]}, *QUESTION]
    assert stage.chat(key, history).status_code == 200
    assert "I will not." in stage.prompt_of(stage.sglang.requests[0])


SIGNS_OF_LIFE = {
    "/chat/completions": ": ping\n\n",
    "/completions": ": ping\n\n",
    "/messages": 'event: ping\ndata: {"type":"ping"}\n\n',
    "/responses": 'event: keepalive\ndata: {"type":"keepalive","sequence_number":',
}
"""Content of a stream in a silence, or its first bytes."""


def test_a_silent_stream_shows_that_it_lives(stage: Stage) -> None:
    gate = threading.Event()
    fails = Script(fault="400", delay_s=PING_AFTER_S + 1)
    stage.sglang.script = lambda request: (
        fails if "fail" in stage.prompt_of(request) else Script(gate=gate)
    )
    alive = threading.Barrier(len(LEAST) + 1)
    texts: dict[str, str] = {}

    def read(route: str, key: str) -> None:
        with stage.stream(route, LEAST[route], key) as answer:
            is_told = False
            for line in answer.iter_lines():
                texts[route] = texts.get(route, "") + line + "\n"
                if not is_told and line == SIGNS_OF_LIFE[route].partition("\n")[0]:
                    is_told = True
                    alive.wait()

    readers = [
        threading.Thread(target=read, args=(route, stage.open_session()[1])) for route in LEAST
    ]
    for reader in readers:
        reader.start()
    try:
        failed = stage.ask(stage.open_session()[1], "fail", stream=True)
        alive.wait(scaled(60))
    finally:
        gate.set()
    ping, error, end = failed.text.split("\n\n", 2)
    assert (failed.status_code, ping, end) == (200, ": ping", "data: [DONE]\n\n")
    assert "too warm" in json.loads(error.removeprefix("data: "))["error"]["message"]
    for reader in readers:
        reader.join(scaled(60))
    for route, text in texts.items():
        before, _, after = text.partition(SIGNS_OF_LIFE[route])
        assert "data: " in before
        assert "data: " in after
