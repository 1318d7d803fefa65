"""Another replica continues a reply when one dies, and the record matches the sampled tokens."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from areal_hpc.session.tree import Interaction, unpack_ids
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.replicas import ReplicaView
from tests.contract.proxy.talk import QUESTION, counted
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script, ScriptedSGLang
from tests.support.waiting import wait_for

FAILOVERS = "failovers_total"
BEGINNING, END = "hello world the quick", " brown fox jumps"


def serve_both(stage: Stage, other: ScriptedSGLang, version: str = "1.0") -> None:
    """Make both servers known to the proxy, the first with that version."""
    stage.relay.replicas = [
        ReplicaView(0, 1, "serving", stage.sglang.url, version),
        ReplicaView(1, 1, "serving", other.url, "1.1"),
    ]
    stage.await_polls()


@pytest.fixture(scope="module")
def other(shared_stage: Stage) -> Iterator[ScriptedSGLang]:
    """Start a second server, which gets a session when the first one has lost it."""
    other = ScriptedSGLang(shared_stage.tokenizer, version="1.1")
    shared_stage.loop.run(other.start())
    serve_both(shared_stage, other)
    yield other
    shared_stage.route_to(shared_stage.sglang.url)
    shared_stage.loop.run(other.stop())


@pytest.fixture
def stage(shared_stage: Stage, other: ScriptedSGLang) -> Stage:
    """Return the shared stage, whose own server has every session until it dies."""
    for server in (shared_stage.sglang, other):
        server.script = lambda request: Script()
        server.requests.clear()
        server.incremental = False
    health = f"{shared_stage.url}/healthz"  # the first server may have died in the test before
    wait_for(lambda: shared_stage.http.get(health).json()["replicas_serving"] == 2)
    return shared_stage


@pytest.fixture
def key(stage: Stage, other: ScriptedSGLang) -> str:
    """Return the key of a session on the stage's own server."""
    return open_at_home(stage, other)


def open_at_home(stage: Stage, other: ScriptedSGLang, **session: Any) -> str:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    for _ in range(5000):  # other tests leave sessions there, and new ones go to the least busy
        _, key = stage.open_session(TicketRef(1, 0), **session)
        assert stage.post("/generate", body, key).status_code == 200
        is_at_home = bool(stage.sglang.requests)
        for server in (stage.sglang, other):
            server.requests.clear()
        if is_at_home:
            return key
    raise AssertionError(stage.log)


def speak(stage: Stage, key: str, **more: Any) -> tuple[str, Exception | None, list[float]]:
    """Stream a reply and return its text, its success, and the log-probabilities."""
    text, error = "", None
    logprobs: list[float] = []
    with stage.client(key).with_options(max_retries=0) as client:
        stream = client.chat.completions.create(model="m", messages=QUESTION, stream=True, **more)
        try:
            for chunk in stream:
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    if choice.logprobs is not None:
                        logprobs += [token.logprob for token in choice.logprobs.content]
        except Exception as caught:
            error = caught
    return text, error, logprobs


def spans_of(recorded: Interaction) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in recorded.spans]


def dies_after(pieces: int) -> Callable[[dict[str, Any]], Script]:
    return lambda request: Script(BEGINNING + END, fault=f"late_hang_up:{pieces}", piece_tokens=2)


def test_streams_continue_elsewhere(stage: Stage, key: str, other: ScriptedSGLang) -> None:
    assert stage.chat(key, QUESTION).status_code == 200
    stage.sglang.script = dies_after(3)
    other.script = lambda request: Script(END, piece_tokens=2)
    stage.sglang.requests.clear()
    before = counted(stage, FAILOVERS)
    text, error, logprobs = speak(stage, key, logprobs=True, max_tokens=50)
    assert error is None
    assert counted(stage, FAILOVERS) == before + 1
    (first,), (second,) = stage.sglang.requests, other.requests
    reply_ids = second["input_ids"][len(first["input_ids"]) :]
    assert second["input_ids"][: len(first["input_ids"])] == first["input_ids"]
    assert len(reply_ids) == 6
    assert second["sampling_params"]["max_new_tokens"] == 50 - 6
    assert second["sampling_params"]["sampling_seed"] == first["sampling_params"]["sampling_seed"]
    recorded = stage.journaled(key)[-1]
    ids = unpack_ids(recorded.output_ids).tolist()
    end_ids = stage.tokenizer.encode(END, add_special_tokens=False).ids
    assert ids == [*reply_ids, *end_ids, stage.tokenizer.token_to_id("<|im_end|>")]
    assert text == recorded.reply["content"] == stage.tokenizer.decode(reply_ids) + END
    assert spans_of(recorded) == [(1 << 32, 0, 6), (1 << 32 | 1, 6, len(ids))]
    expected = [-0.5 - 0.001 * i for i in [*range(6), *range(len(end_ids))]]
    assert logprobs == pytest.approx(expected)
    assert (recorded.finish_reason, recorded.closed) == ("stop", True)


def test_what_could_be_sampled_is_joined_over_replicas(stage: Stage, other: ScriptedSGLang) -> None:
    key = open_at_home(stage, other, records_sampling_mask=True)
    stage.sglang.script = dies_after(3)
    other.script = lambda request: Script(END, piece_tokens=2)
    _, error, _ = speak(stage, key, top_p=0.9, max_tokens=50)
    assert error is None
    requests = [*stage.sglang.requests, *other.requests]
    assert [request["return_sampling_mask"] for request in requests] == [True, True]
    vocab = json.loads((stage.model_dir / "config.json").read_text())["vocab_size"]
    assert {request["sampling_params"]["top_k"] for request in requests} == {vocab}
    (recorded,) = stage.journaled(key)
    ids = unpack_ids(recorded.output_ids).tolist()
    assert np.frombuffer(recorded.kept_counts, "<u2").tolist() == [2] * len(ids)
    assert unpack_ids(recorded.kept_ids)[::2].tolist() == ids
    ends = len(ids) - 6
    expected = [-0.25 - 0.001 * i for i in [*range(6), *range(ends)]]
    assert np.frombuffer(recorded.logprobs, "<f4").tolist() == pytest.approx(expected)


def test_a_broken_call_goes_on_with_versions(stage: Stage, key: str, other: ScriptedSGLang) -> None:
    versions = [("0.9", 0, 2), ("1.0", 2, 4)]
    stage.sglang.script = lambda request: Script(
        "hello world", fault="abort", finish="length", versions=versions
    )
    other.script = lambda request: Script(END)
    text, error, _ = speak(stage, key)
    assert error is None
    assert text == "hello world" + END
    (recorded,) = stage.journaled(key)
    count = recorded.num_output_tokens
    assert spans_of(recorded) == [(9, 0, 2), (1 << 32, 2, 4), (1 << 32 | 1, 4, count)]


def breaks_off(request: dict[str, Any]) -> Script:
    return Script("hello world", fault="abort", finish="length")


def test_a_broken_whole_call_goes_on(stage: Stage, key: str, other: ScriptedSGLang) -> None:
    stage.sglang.script = breaks_off
    other.script = lambda request: Script(END)
    before = counted(stage, FAILOVERS)
    answer = stage.chat(key, QUESTION, max_tokens=50)
    assert answer.json()["choices"][0]["message"]["content"] == "hello world" + END
    assert counted(stage, FAILOVERS) == before + 1
    (first,), (second,) = stage.sglang.requests, other.requests
    reply_ids = stage.tokenizer.encode("hello world", add_special_tokens=False).ids
    assert second["input_ids"] == first["input_ids"] + reply_ids
    (recorded,) = stage.journaled(key)
    assert spans_of(recorded) == [
        (1 << 32, 0, len(reply_ids)),
        (1 << 32 | 1, len(reply_ids), recorded.num_output_tokens),
    ]


def test_uncontinuable_calls_are_repeated(stage: Stage, key: str, other: ScriptedSGLang) -> None:
    stage.sglang.script = breaks_off
    other.script = lambda request: Script(END)
    answer = stage.chat(key, QUESTION, frequency_penalty=0.5)
    assert answer.json()["choices"][0]["message"]["content"] == END
    assert [request["input_ids"] for request in stage.sglang.requests] == [
        request["input_ids"] for request in other.requests
    ]


@pytest.mark.parametrize(
    "more", [{"stop": ["quick brown"]}, {"frequency_penalty": 0.5}, {"extra_body": {"regex": ".*"}}]
)
def test_what_another_replica_cannot_go_on_with_ends_with_an_error(
    stage: Stage, key: str, other: ScriptedSGLang, more: dict[str, Any]
) -> None:
    count = len(stage.tokenizer.encode(BEGINNING, add_special_tokens=False).ids)
    stage.sglang.script = dies_after((count + 1) // 2)
    text, error, _ = speak(stage, key, **more)
    assert text
    assert "was lost" in str(error)
    assert other.requests == []
    assert stage.end_session(key) == 0


def test_unknown_versions_are_not_continued(stage: Stage, key: str, other: ScriptedSGLang) -> None:
    stage.sglang.script = dies_after(2)
    serve_both(stage, other, version="0.9")  # the server reports 1.0 by now
    text, error, _ = speak(stage, key)
    serve_both(stage, other)
    assert text
    assert "was lost" in str(error)
    assert other.requests == []
