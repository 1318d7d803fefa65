"""The proxy records calls of clients once and as sampled, and only if they are sound."""

import time
from typing import Any

import httpx
import msgspec
import pytest

from areal_hpc.proxy.sessions.recorder import EVENT_RECORD_KIND
from areal_hpc.proxy.sessions.store import (
    InteractionAdded,
    RewardSet,
    SessionEnded,
    TicketFinished,
    encode_event,
)
from areal_hpc.session.call_records import decode_sampling_params_json
from areal_hpc.session.tree import Interaction, VersionSpan, pack_ids, pack_logprobs, unpack_ids
from areal_hpc.shards.journal import JournalWriter
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import TicketRef
from tests.contract.proxy.talk import change_call, generate_reply
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script
from tests.support.waiting import wait_for

INF, NAN = float("inf"), float("nan")
FUTURE = (9 << 32) + 1
"""Weights that no replica of the stage has ever had."""

UNSOUND: dict[str, dict[str, Any]] = {
    "an array that is cut short": {"output_ids": b"\x01\x00\x00\x00\x02"},
    "fewer log-probabilities": {"logprobs": pack_logprobs([-0.5] * 4)},
    "more log-probabilities": {"logprobs": pack_logprobs([-0.5] * 6)},
    "a negative prompt": {"prompt_tokens": -5},
    "a prompt of 2**40": {"prompt_tokens": 2**40},
    "a negative id": {"output_ids": pack_ids([-7, 1, 2, 3, 4])},
    "an id outside the vocabulary": {"output_ids": pack_ids([2**31 - 1, 1, 2, 3, 4])},
    "a prompt's id outside the vocabulary": {"new_ids": "of 10**6"},
    "a log-probability that is no number": {"logprobs": pack_logprobs([NAN] * 5)},
    "an infinite log-probability": {"logprobs": pack_logprobs([-INF] * 5)},
    "a version of 2**63": {"spans": [VersionSpan(2**63, 0, 5)]},
    "a version of 2**70": {"spans": [[2**70, 0, 5]]},
    "a negative version": {"spans": [VersionSpan(-2, 0, 5)]},
    "a version of the future": {"spans": [VersionSpan(FUTURE, 0, 5)]},
    "no versions": {"spans": []},
    "versions outside the reply": {"spans": [VersionSpan(0, 0, 9)]},
    "versions with a gap": {"spans": [VersionSpan(0, 0, 2), VersionSpan(0, 3, 5)]},
    "a temperature of 1e300": {"temperature": 1e300},
    "a reward of 1e300": {"reward": 1e300},
    "a context that is no JSON": {"context": b"{"},
    "a message without a role": {"new_messages": [{"content": "hi"}]},
    "a context nested too deeply": {"context": b"[" * 5000 + b"]" * 5000},
    "a text beside calls that is a list": {
        "reply": {"role": "assistant", "content": ["a"], "tool_calls": [{"function": {}}]}
    },
    "calls that are none": {"reply": {"role": "assistant", "content": "", "tool_calls": ["x"]}},
    "sampling parameters that are no JSON": {"sampling": b"{"},
    "sampling parameters that are no object": {"sampling": b"[1]"},
    "a top_p that is null": {"sampling": b'{"temperature": 1.0, "top_p": null}'},
    "a top_k that is a text": {"sampling": b'{"top_k": "20"}'},
    "sampling parameters nested too deeply": {"sampling": b'{"a":' * 5000 + b"1" + b"}" * 5000},
    "a replica of 2**40": {"replica": 2**40},
    "fewer cached tokens than none": {"cached_tokens": -1},
    "no id": {"interaction_id": ""},
    "a parent that is not there": {"parent_id": "nobody"},
}


@pytest.fixture
def sound(stage: Stage) -> Interaction:
    """Return a call as the proxy itself recorded it."""
    _, key = stage.open_session(TicketRef(1, 0))
    assert stage.ask(key, "hi").status_code == 200
    (interaction,) = stage.await_journaled(key)
    return interaction


def changed(sound: Interaction, change: dict[str, Any]) -> dict[str, Any]:
    if change.get("new_ids") == "of 10**6":
        change = {"new_ids": pack_ids([10**6] * (len(sound.new_ids) // 4))}
    return change_call(sound, **change)


def test_unsound_calls_get_400_and_sound_ones_an_entry(stage: Stage, sound: Interaction) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    generate_reply(stage, key, sound)
    for defect, change in UNSOUND.items():
        answer = stage.post("/rl/record", {"interactions": [changed(sound, change)]}, key)
        assert answer.status_code == 400, (defect, answer.text)
        message = answer.json()["error"]["message"]
        assert "expected" in message or "not in the session" in message, defect
        assert "/generate gave" not in message, "the reply is one that it was given"
    assert stage.journaled(key) == []
    answer = stage.post("/rl/record", {"interactions": [changed(sound, {})]}, key)
    assert answer.json() == {"interaction_count": 1}
    assert len(stage.await_journaled(key)) == 1


def test_weights_are_known_by_the_replies_passed_on(stage: Stage, sound: Interaction) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    stage.sglang.script = lambda request: Script("hello world", versions=[("9.1", 0, 5)])
    generate_reply(stage, key, sound)
    body = {"interactions": [changed(sound, {"spans": [VersionSpan(FUTURE, 0, 5)]})]}
    assert stage.post("/rl/record", body, key).status_code == 200
    stage.restart_proxy()  # clears it for the other tests


def test_a_restarted_proxy_waits_for_weights(stage: Stage, key: str, sound: Interaction) -> None:
    generate_reply(stage, key, sound)
    stage.kill_proxy()
    stage.relay.show(stage.sglang.url, state="starting")
    stage.start_proxy()
    of_1_0 = changed(sound, {"spans": [VersionSpan(1 << 32, 0, 5)]})
    assert stage.post("/rl/record", {"interactions": [of_1_0]}, key).status_code == 503
    stage.route_to(stage.sglang.url)
    assert stage.post("/rl/record", {"interactions": [of_1_0]}, key).status_code == 200
    of_9_1 = changed(sound, {"spans": [VersionSpan(FUTURE, 0, 5)], "interaction_id": "next"})
    refused = stage.post("/rl/record", {"interactions": [of_9_1]}, key)
    assert (
        "expected weights up to version 1.0, the newest known to this cell, got 9.1"
        in (refused.json()["error"]["message"])
    )


def poison(stage: Stage, good_ref: TicketRef, **unsound: Any) -> dict[TicketRef, str]:
    """Finish the ticket, journal unsound calls of others, and return their sessions."""
    refs = [TicketRef(good_ref.ticket_id, attempt) for attempt in range(10, 10 + len(unsound))]
    sessions = {ref: stage.open_session(ref)[0] for ref in refs}
    session_id, key = stage.open_session(good_ref)
    stage.ask(key, "hi")
    (sound,) = stage.await_journaled(key)
    stage.finish_session(key, 1.0)
    assert stage.finish_ticket(good_ref, session_id) == 1
    stage.kill_proxy()
    writer = JournalWriter(stage.journal, 60.0)
    for (ref, session_id), (field, value) in zip(sessions.items(), unsound.items(), strict=True):
        bad = msgspec.structs.replace(sound, interaction_id="bad", **{field: value})
        for event in (
            InteractionAdded(session_id, bad),
            RewardSet(session_id, "bad", Reward(1.0)),
            SessionEnded(session_id),
            TicketFinished(ref, [session_id], time.time()),
        ):
            writer.append(EVENT_RECORD_KIND, encode_event(event))
    writer.close()
    return sessions


def test_unsound_calls_in_a_journal_cost_their_tickets_alone(stage: Stage, ref: TicketRef) -> None:
    sessions = poison(
        stage,
        ref,
        output_ids=b"\x01\x00\x00\x00\x02",
        prompt_tokens=2**40,
        logprobs=pack_logprobs([NAN] * 5),
        context=b"{",
        spans=[VersionSpan(0, 0, 2**40)],
        reply={"role": "assistant", "content": ["a"], "tool_calls": ["x"]},
    )
    stage.start_proxy()
    assert stage.seal() == 1
    assert [ticket.ref for ticket in stage.ledger.settled] == [ref]
    assert {ticket.ref for ticket in stage.ledger.dropped} == sessions.keys()
    for dropped in stage.ledger.dropped:
        reason = "cannot be sealed: its journal holds an unsound call: expected"
        assert reason in dropped.reason, dropped.ref
        assert stage.finish_ticket(dropped.ref, sessions[dropped.ref]) == 0
    stage.restart_proxy()
    assert stage.seal() == 0
    assert (len(stage.ledger.settled), len(stage.ledger.dropped)) == (1, len(sessions))
    assert len(stage.sealed_rows(ref)) == 1


def test_tickets_are_reported_once_the_ledger_answers_again(stage: Stage, ref: TicketRef) -> None:
    unsound = poison(stage, ref, prompt_tokens=-1)
    stage.ledger.away = True
    stage.start_proxy()
    assert stage.seal() == 1
    stage.restart_proxy()
    time.sleep(0.5)
    assert (stage.ledger.settled, stage.ledger.dropped) == ([], [])
    stage.ledger.away = False
    wait_for(lambda: stage.ledger.dropped, why=lambda: stage.log)
    assert [ticket.ref for ticket in stage.ledger.settled] == [ref]
    assert [ticket.ref for ticket in stage.ledger.dropped] == [*unsound]
    assert len(stage.sealed_rows(ref)) == 1


REFUSAL = (
    "expected prompt, tokens, log-probabilities, weight versions and sampling mask "
    "(if the reply had one) of a reply"
)


def record(stage: Stage, key: str, call: dict[str, Any]) -> httpx.Response:
    return stage.post("/rl/record", {"interactions": [call]}, key)


def test_a_reply_that_nobody_generated_is_refused(stage: Stage, sound: Interaction) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    refused = record(stage, key, change_call(sound))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "interactions")
    assert REFUSAL in refused.text
    assert stage.journaled(key) == []


@pytest.mark.parametrize("field", ["new_ids", "output_ids", "logprobs", "spans"])
def test_a_reply_is_recorded_only_as_sampled(stage: Stage, sound: Interaction, field: str) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    generate_reply(stage, key, sound)
    prompt, output = unpack_ids(sound.new_ids).tolist(), unpack_ids(sound.output_ids).tolist()
    altered: dict[str, Any] = {
        "new_ids": pack_ids([*prompt[:-1], prompt[-1] ^ 1]),
        "output_ids": pack_ids([output[0] ^ 1, *output[1:]]),
        "logprobs": pack_logprobs([-1e-5] * len(output)),
        "spans": [VersionSpan(0, 0, len(output))],
    }
    refused = record(stage, key, change_call(sound, **{field: altered[field]}))
    assert refused.status_code == 400
    assert REFUSAL in refused.text
    assert record(stage, key, change_call(sound)).status_code == 200
    assert len(stage.await_journaled(key)) == 1


def test_next_to_no_temperature_makes_a_greedy_reply(stage: Stage, sound: Interaction) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    generate_reply(stage, key, sound)
    assert record(stage, key, change_call(sound, temperature=1e-8)).status_code == 200
    (interaction,) = stage.await_journaled(key)
    assert interaction.temperature == 0.0
    assert decode_sampling_params_json(interaction.sampling)["temperature"] == 0.0


def test_a_reply_of_another_session_is_refused(stage: Stage, sound: Interaction) -> None:
    _, other = stage.open_session(TicketRef(2, 0))
    _, key = stage.open_session(TicketRef(2, 0), episode=1)
    generate_reply(stage, other, sound)
    assert REFUSAL in record(stage, key, change_call(sound)).text
    assert record(stage, other, change_call(sound)).status_code == 200


def test_a_reply_counts_once_even_after_a_restart(stage: Stage, sound: Interaction) -> None:
    _, key = stage.open_session(TicketRef(2, 0))
    for _ in range(2):
        generate_reply(stage, key, sound)
    for name in ("one", "two", "one"):
        assert record(stage, key, change_call(sound, interaction_id=name)).status_code == 200
    assert REFUSAL in record(stage, key, change_call(sound, interaction_id="three")).text
    stage.restart_proxy()
    stage.route_to(stage.sglang.url)
    assert REFUSAL in record(stage, key, change_call(sound, interaction_id="three")).text
    assert [entry.interaction_id for entry in stage.journaled(key)] == ["one", "two"]
