"""`/generate`: SGLang reads what the proxy wrote, under a name that the proxy made."""

import re
import threading
from typing import Any

import httpx
import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for

BODY: dict[str, Any] = {
    "input_ids": [5, 6],
    "sampling_params": {"temperature": 0.5, "max_new_tokens": 4},
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs_num": 1_000_000}, "top_logprobs_num"),
    ({"n": 300}, "n"),
    ({"lora_path": "/etc"}, "lora_path"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"sampling_params": {"n": 300}}, "sampling_params.n"),
    ({"sampling_params": {"temperature": 1e308}}, "sampling_params.temperature"),
    ({"sampling_params": {"custom_params": {}}}, "sampling_params.custom_params"),
    ({"sampling_params": {"stop_token_ids": [512]}}, "sampling_params.stop_token_ids"),
    ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params"),
    ({"input_ids": [512]}, "input_ids"),
    ({"input_ids": [[5], [6]]}, "input_ids[0]"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [5] * 2048}, "input_ids"),
    ({"stream": True}, "stream"),
]


@pytest.mark.parametrize(("change", "key_at_fault"), WRONG, ids=[name for _, name in WRONG])
def test_what_sglang_may_die_of_is_refused_by_name(
    stage: Stage, key: str, change: dict[str, Any], key_at_fault: str
) -> None:
    answer = stage.post("/generate", BODY | change, key)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == key_at_fault
    assert stage.sglang.requests == []


def test_sglang_gets_the_allowed_fields_under_a_name_of_the_proxys(stage: Stage, key: str) -> None:
    for _ in range(2):
        body = BODY | {"rid": "a", "top_logprobs_num": 2, "return_logprob": False}
        assert stage.post("/generate", body, key).status_code == 200
    names = {request.pop("rid") for request in stage.sglang.requests}
    assert len(names) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
    for request in stage.sglang.requests:
        sampling = request.pop("sampling_params")
        assert sampling | BODY["sampling_params"] == sampling
        assert request == {"input_ids": [5, 6], "top_logprobs_num": 2, "return_logprob": True}


def test_a_hang_up_aborts_that_request_alone(stage: Stage, key: str) -> None:
    gate = threading.Event()
    stage.sglang.script = lambda request: Script(gate=gate)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{stage.url}/generate",
            json=BODY | {"rid": "a"},
            headers={"authorization": f"Bearer {key}"},
            timeout=0.3,
            trust_env=False,
        )
    wait_for(lambda: len(stage.sglang.aborted) == 1)
    gate.set()
    assert stage.sglang.aborted == [request["rid"] for request in stage.sglang.requests]
    assert stage.sglang.aborted != ["a"], "that would begin the names of others, too"


def test_a_body_that_is_no_text_costs_no_replica(stage: Stage, key: str) -> None:
    stage.sglang.script = lambda request: Script(fault="500")
    headers = {"authorization": f"Bearer {key}"}
    body = b'{"input_ids":[5],"rid":"\xff"}'
    answer = stage.http.post(f"{stage.url}/generate", content=body, headers=headers)
    assert answer.status_code == 400
    stage.sglang.script = lambda request: Script()
    assert stage.post("/generate", BODY, key).status_code == 200


def test_only_a_session_opened_for_it_generates_and_records_by_itself(stage: Stage) -> None:
    _, key = stage.open_session(TicketRef(1, 0), records_calls=False)
    assert stage.ask(key, "hi").status_code == 200
    (said,) = stage.await_journaled(key)
    fields = {name: getattr(said, name) for name in said.__struct_fields__}
    never_said = {"interactions": [fields | {"interaction_id": "never-said"}]}
    requests = len(stage.sglang.requests)
    for route, body in (("/generate", BODY), ("/rl/record", never_said)):
        answer = stage.post(route, body, key)
        assert answer.status_code == 403
        assert "not opened for a client that records its own calls" in answer.text
    assert len(stage.sglang.requests) == requests
    assert [one.interaction_id for one in stage.journaled(key)] == [said.interaction_id]
