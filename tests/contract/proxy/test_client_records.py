"""What clients record by themselves: the replies that `/generate` gave them, each once."""

from typing import Any

import httpx
import pytest

from areal_hpc.session.call_records import decode_sampling_params_json
from areal_hpc.session.tree import Interaction, VersionSpan, pack_ids, pack_logprobs, unpack_ids
from areal_hpc.wire.ledger import TicketRef
from tests.support.client_calls import change_call, generate_reply
from tests.support.proxy_stage import Stage

REFUSAL = (
    "expected prompt, tokens, log-probabilities, weight versions and sampling mask "
    "(if the reply had one) of a reply"
)


@pytest.fixture
def said(stage: Stage) -> Interaction:
    """A call as the proxy itself recorded it."""
    _, key = stage.open_session(TicketRef(1, 0))
    assert stage.ask(key, "hi").status_code == 200
    (one,) = stage.await_journaled(key)
    return one


def record(stage: Stage, key: str, call: dict[str, Any]) -> httpx.Response:
    return stage.post("/rl/record", {"interactions": [call]}, key)


def test_a_reply_that_nobody_generated_is_refused(stage: Stage, said: Interaction) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    refused = record(stage, key, change_call(said))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "interactions")
    assert REFUSAL in refused.text
    assert stage.journaled(key) == []


@pytest.mark.parametrize("field", ["new_ids", "output_ids", "logprobs", "spans"])
def test_a_reply_is_recorded_as_it_was_sampled_or_not_at_all(
    stage: Stage, said: Interaction, field: str
) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    generate_reply(stage, key, said)
    prompt, output = unpack_ids(said.new_ids).tolist(), unpack_ids(said.output_ids).tolist()
    altered: dict[str, Any] = {
        "new_ids": pack_ids([*prompt[:-1], prompt[-1] ^ 1]),
        "output_ids": pack_ids([output[0] ^ 1, *output[1:]]),
        "logprobs": pack_logprobs([-1e-5] * len(output)),
        "spans": [VersionSpan(0, 0, len(output))],
    }
    refused = record(stage, key, change_call(said, **{field: altered[field]}))
    assert refused.status_code == 400
    assert REFUSAL in refused.text
    assert record(stage, key, change_call(said)).status_code == 200
    assert len(stage.await_journaled(key)) == 1


def test_a_client_that_asked_for_next_to_no_temperature_has_a_greedy_reply(
    stage: Stage, said: Interaction
) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    generate_reply(stage, key, said)
    assert record(stage, key, change_call(said, temperature=1e-8)).status_code == 200
    (one,) = stage.await_journaled(key)
    assert one.temperature == 0.0
    assert decode_sampling_params_json(one.sampling)["temperature"] == 0.0


def test_a_reply_of_another_session_is_refused(stage: Stage, said: Interaction) -> None:
    _, other = stage.open_session(TicketRef(2, 0))
    _, key = stage.open_session(TicketRef(2, 0), episode=1)
    generate_reply(stage, other, said)
    assert REFUSAL in record(stage, key, change_call(said)).text
    assert record(stage, other, change_call(said)).status_code == 200


def test_a_reply_counts_once_even_after_a_restart(stage: Stage, said: Interaction) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    for _ in range(2):
        generate_reply(stage, key, said)
    for name in ("one", "two", "one"):
        assert record(stage, key, change_call(said, interaction_id=name)).status_code == 200
    assert REFUSAL in record(stage, key, change_call(said, interaction_id="three")).text
    stage.restart_proxy()
    stage.route_to(stage.sglang.url)
    assert REFUSAL in record(stage, key, change_call(said, interaction_id="three")).text
    assert [one.interaction_id for one in stage.journaled(key)] == ["one", "two"]
