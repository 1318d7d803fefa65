"""OpenAI's Responses dialect works for the openai SDK and raw HTTP against a real proxy."""

import json
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError

from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script

QUESTION = "What is 3 + 4?"


def ask(stage: Stage, key: str, items: object = QUESTION, **more: Any) -> httpx.Response:
    return stage.post("/v1/responses", {"input": items, **more}, key)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Decode the events of a stream, in order, each under its name."""
    assert answer.headers["content-type"] == "text/event-stream"
    events: list[dict[str, Any]] = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without the fields that differ between responses."""
    output = [{**item, "id": None} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "output": output}


def test_the_openai_sdk_talks_to_the_proxy(stage: Stage) -> None:
    _, key = stage.open_session(temperature=0.5)
    with stage.client(key) as client:
        response = client.responses.create(
            model="any",
            instructions="Be brief.",
            input=QUESTION,
            max_output_tokens=33,
            metadata={"a": "b"},
        )
    assert response.output_text == "hello world"
    assert (response.status, response.model) == ("completed", "tiny")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    (request,) = stage.sglang.requests
    assert request["sampling_params"]["temperature"] == response.temperature == 0.5
    assert request["sampling_params"]["max_new_tokens"] == 33
    assert response.usage is not None
    assert response.usage.input_tokens == len(request["input_ids"])
    assert stage.prompt_of(request).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>"
    )


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("finish", ["eos", "length"])
def test_streamed_and_whole_responses_are_the_same(stage: Stage, key: str, finish: str) -> None:
    stage.sglang.script = lambda request: Script(finish=finish)
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    complete = ask(stage, key, **options).json()
    events = events_of(ask(stage, key, stream=True, **options))
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert deltas > 3
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed" if finish == "eos" else "incomplete",
    ]
    streamed = events[-1]["response"]
    assert without_names(streamed) == without_names(complete)
    (item,) = streamed["output"]
    assert item == events[-2]["item"]
    shown = [event for event in events if event["type"].endswith("text.delta")]
    (content,) = item["content"]
    assert "".join(event["delta"] for event in shown) == content["text"] == "hello world"
    tokens = [token for event in shown for token in event["logprobs"]]
    assert tokens == content["logprobs"][: len(tokens)]
    assert "".join(token["token"] for token in content["logprobs"]) == content["text"]
    assert [entry.reply["content"] for entry in stage.journaled(key)] == ["hello world"] * 2


def test_items_that_come_back_are_continued_with_the_models_own_tokens(stage: Stage) -> None:
    letters = stage.speak_in_letters()
    _, key = stage.open_session()
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    reply = ""
    with stage.client(key) as client:
        for question in ("and 1?", "and 2?"):
            response = client.responses.create(model="m", input=history, instructions="Add.")
            # Agents hand items back with ids, states and empty lists, or as a bare text.
            reply = response.output_text
            history += [item.model_dump() for item in response.output]
            history.append({"type": "message", "role": "user", "content": question})
        history[1] = {"role": "assistant", "content": reply}
        client.responses.create(model="m", input=history, instructions="Add.")
    stage.assert_continued(letters)


def test_a_response_is_continued_by_its_id_and_brings_its_own_instructions(stage: Stage) -> None:
    letters = stage.speak_in_letters()
    _, key = stage.open_session()
    first = ask(stage, key, instructions="Add.").json()["id"]
    second = ask(stage, key, "and 1?", instructions="Add.", previous_response_id=first).json()
    assert second["previous_response_id"] == first
    stage.assert_continued(letters)
    ask(stage, key, "and 2?", previous_response_id=second["id"])
    prompt = stage.prompt_of(stage.sglang.requests[-1])
    assert "Add." not in prompt
    assert prompt.count("hello") == 2
    assert prompt.endswith("and 2?<|im_end|>\n<|im_start|>assistant\n")


def test_the_items_of_one_reply_are_one_message(stage: Stage, key: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    eight = [{"type": "input_text", "text": "8"}]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
        {"role": "user", "content": QUESTION},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {**call, "id": "fc_1", "namespace": None, "status": "completed"},
        {**call, "call_id": "d", "namespace": "sums"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {"type": "function_call_output", "call_id": "d", "output": eight},
    ]  # fmt: skip
    assert ask(stage, key, items).status_code == 200
    assert stage.prompt_of(stage.sglang.requests[0]) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
        "<|im_start|>assistant\nI<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n"
        "<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n"
    )


def test_finished_responses_are_retrieved_until_they_are_deleted(stage: Stage, key: str) -> None:
    with stage.client(key) as client:
        complete = client.responses.create(model="m", input="hi", instructions="Add.")
        with client.responses.stream(model="m", input="hi") as stream:
            stream.until_done()
            streamed = stream.get_final_response()
        assert client.responses.retrieve(complete.id) == complete
        retrieved = client.responses.retrieve(streamed.id)
        assert retrieved.output_text == "hello world"
        assert retrieved.output[0].to_dict()["id"] == streamed.output[0].to_dict()["id"]
        assert retrieved.usage == streamed.usage
        client.responses.delete(complete.id)
        for gone in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(NotFoundError, match=complete.id):
                gone(complete.id)
        later = client.responses.create(model="m", input="and?", previous_response_id=complete.id)
        assert client.responses.retrieve(later.id).previous_response_id == complete.id
        client.responses.retrieve(later.id, include=["reasoning.encrypted_content"])
        with pytest.raises(BadRequestError) as caught:
            client.responses.retrieve(later.id, stream=True)
        assert caught.value.param == "stream"


def test_a_session_keeps_the_newest_of_many_large_responses(stage: Stage, key: str) -> None:
    users = [str(number % 10) * 60_000 for number in range(20)]
    names = [ask(stage, key, user=user).json()["id"] for user in users]
    headers = {"x-api-key": key}

    def get(name: str) -> httpx.Response:
        return stage.http.get(f"{stage.url}/responses/{name}", headers=headers)

    assert get(names[-1]).json()["user"] == users[-1]
    assert get(names[0]).status_code == 404, "the session holds the bodies of all its Responses"
    assert stage.http.delete(f"{stage.url}/responses/{names[-1]}", headers=headers).is_success
    assert get(names[-1]).status_code == 404
    assert ask(stage, key, "and?", previous_response_id=names[0]).status_code == 200


def test_only_stored_responses_are_retrieved_by_their_session(stage: Stage, key: str) -> None:
    _, other = stage.open_session()
    stored, hidden = (ask(stage, key, store=store).json()["id"] for store in (True, False))

    def status_of(key: str, response_id: str, method: str = "GET") -> int:
        return stage.http.request(
            method, f"{stage.url}/responses/{response_id}", headers={"x-api-key": key}
        ).status_code

    assert status_of(key, stored) == 200
    assert status_of(key, hidden) == status_of(other, stored) == status_of(key, "") == 404
    assert status_of(key, stored, "PUT") == 405
    for path, status in ((f"{stored}/cancel", 400), (f"{hidden}/cancel", 404), ("compact", 400)):
        answer = stage.post(f"/v1/responses/{path}", {}, key)
        assert (answer.status_code, "allow" in answer.headers) == (status, False)
    refused = ask(stage, other, "and?", previous_response_id=stored)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    assert stored in refused.json()["error"]["message"]
    assert stage.end_session(key) == 2
    assert status_of(key, stored) == 403
