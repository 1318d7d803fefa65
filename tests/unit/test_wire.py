"""Shared parts of a run's services: retries, requests, answers, sound rows, weight versions."""

import asyncio
import dataclasses
import socket
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from areal_hpc.errors import ClusterError, HttpStatusError
from areal_hpc.wire.agent_reward import MAX_REWARD
from areal_hpc.wire.http import responds_with_200
from areal_hpc.wire.http_server import JsonApp, read_body
from areal_hpc.wire.retry import Backoff, retry
from areal_hpc.wire.trajectory import find_row_defect
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness_steps
from tests.support.sample_trajectories import trajectory


def test_pauses_double_up_to_a_limit() -> None:
    backoff = Backoff(0.5, 3.0)
    assert list(islice(backoff, 4)) == [0.5, 1.0, 2.0, 3.0]
    assert backoff.get_pause_s(10**6) == 3.0


def test_a_server_that_never_answers_does_not_hold_up_its_probe() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not responds_with_200(
            "GET", f"http://127.0.0.1:{listener.getsockname()[1]}/ready", 0.2
        )
    assert not responds_with_200("GET", "http://127.0.0.1:1/ready", 0.2)


class Echo(JsonApp):
    async def answer(self, request: Request) -> tuple[int, bytes]:
        return 200, await read_body(request, 4)


def ask(parts: list[bytes | None], *headers: tuple[bytes, bytes]) -> tuple[list[Message], int]:
    """Send a body in parts, None for a hang-up; return the answer and the count of unread parts."""
    messages: list[Message] = [
        {"type": "http.disconnect"}
        if part is None
        else {"type": "http.request", "body": part, "more_body": index + 1 < len(parts)}
        for index, part in enumerate(parts)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
    asyncio.run(Echo("secret")(scope, receive, send))
    return sent, len(messages)


KEY = (b"authorization", b"Bearer secret")


@pytest.mark.parametrize(
    "given", [b"", b"Bearer", b"Bearer \xff\xfe", b"Bearer secret2", b"Bearer SECRET", b"secret"]
)
def test_nothing_is_read_of_a_request_without_the_services_key(given: bytes) -> None:
    sent, unread = ask([b"1"], (b"authorization", given))
    assert (sent[0]["status"], b"secret" in sent[1]["body"]) == (401, False)
    assert unread == 1
    assert ask([b"1"])[0][0]["status"] == 401


@pytest.mark.parametrize(
    ("announced", "unread"), [(b"6", 3), (b"4", 1)], ids=["announced", "found out"]
)
def test_a_body_over_the_limit_is_not_read(announced: bytes, unread: int) -> None:
    result = ask([b"123", b"45", b"6"], KEY, (b"content-length", announced))
    assert (result[0][0]["status"], result[1]) == (413, unread)


def test_a_whole_body_is_answered_and_a_torn_one_is_not() -> None:
    sent, _ = ask([b"[1", b"]"], KEY)
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"[1]")
    assert (b"content-type", b"application/json") in sent[0]["headers"]
    assert ask([b"[1", None], KEY)[0] == []


def test_a_call_is_repeated_while_its_peer_is_away_or_busy_and_no_longer() -> None:
    failures: list[ClusterError] = [ClusterError("away"), HttpStatusError(503, "u", "busy")]
    left = [*failures]

    def call() -> str:
        if left:
            raise left.pop(0)
        return "answered"

    assert retry(call, within_s=60.0) == "answered"
    left += [HttpStatusError(409, "u", "no"), ClusterError("never raised")]
    with pytest.raises(HttpStatusError, match="409"):
        retry(call, within_s=60.0)
    for limits in ({"within_s": 0.0}, {"within_s": 60.0, "is_stopping": lambda: True}):
        left[:] = failures
        with pytest.raises(ClusterError, match="away"):
            retry(call, **limits)
        assert len(left) == 1


SOUND = trajectory(tokens=6)
IDS, LOGPROBS = SOUND.input_ids_T, SOUND.logprobs_T


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids_T": IDS - 1}, "expected token ids from 0 to 5, got -1"),
        ({"input_ids_T": IDS + 1}, "expected token ids from 0 to 5, got 6"),
        ({"loss_mask_T": np.full(6, 2, np.uint8)}, "expected a loss mask of 0 and 1, got 2"),
        ({"logprobs_T": LOGPROBS * np.float32("nan")}, "expected finite log-probabilities"),
        ({"logprobs_T": LOGPROBS - np.float32("inf")}, "expected finite log-probabilities"),
        ({"versions_T": np.full(6, -1, np.int64)}, "expected a weight version for every sampled"),
        ({"reward": float("nan")}, "expected a finite 32-bit float as reward, got nan"),
        ({"reward": 2 * MAX_REWARD}, "expected a finite 32-bit float as reward"),
        ({"temperature": -0.1}, "expected a temperature from 0 to 100, got -0.1"),
        ({"temperature": 1e300}, "expected a temperature from 0 to 100, got 1e+300"),
        ({"temperature": float("nan")}, "expected a temperature from 0 to 100, got nan"),
        ({"episode": 2**31}, "expected attempt, episode and row from 0 to 2**31 - 1"),
        ({"attempt": 2**40}, "expected attempt, episode and row from 0 to 2**31 - 1"),
    ],
)
def test_a_defect_is_named_with_what_was_expected(change: dict[str, Any], message: str) -> None:
    assert find_row_defect(SOUND, vocab_size=6) is None
    assert message in str(find_row_defect(dataclasses.replace(SOUND, **change), vocab_size=6))


def test_versions_of_tokens_that_nobody_sampled_do_not_matter() -> None:
    assert (SOUND.versions_T == -1).any()
    assert find_row_defect(trajectory(tokens=0)) is None


versions = st.builds(WeightVersion, st.integers(0, 2**20), st.integers(0, 2**31))


@given(versions)
def test_both_forms_round_trip(version: WeightVersion) -> None:
    assert WeightVersion.parse(str(version)) == version
    assert WeightVersion.unpack(version.packed) == version


@given(versions, versions)
def test_packed_versions_keep_their_order(first: WeightVersion, second: WeightVersion) -> None:
    assert (first < second) == (first.packed < second.packed)


@pytest.mark.parametrize("text", ["", "3", "3.", ".3", "a.b", "default", "1.-2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"generation\.step"):
        WeightVersion.parse(text)


@pytest.mark.parametrize(
    ("current", "sampled_by", "shared_steps", "steps"),
    [
        ((1, 7), (1, 5), [0], 2),
        # Generation 1 reached step 8 but only 5 was saved; generation 2 is now at 6.
        ((2, 6), (1, 8), [0, 5], 1),
        ((2, 6), (1, 4), [0, 5], 2),
        ((3, 6), (1, 8), [0, 5, 3], 3),
    ],
)
def test_staleness_counts_steps_from_the_oldest_one_that_both_generations_share(
    current: tuple[int, int], sampled_by: tuple[int, int], shared_steps: list[int], steps: int
) -> None:
    forks = [GenerationFork(generation, step) for generation, step in enumerate(shared_steps, 1)]
    assert (
        compute_staleness_steps(WeightVersion(*current), WeightVersion(*sampled_by), forks) == steps
    )
