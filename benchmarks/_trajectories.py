"""Trajectories to measure with: many turns each, lengths spread evenly over a logarithmic scale."""

import random
import string

import numpy as np
import numpy.typing as npt

from areal_hpc.wire.trajectory import CallRecord, RowRecord, TrajectoryRow

LONGEST_TOKENS = 32_000
N_SAMPLES = 8
"""Trajectories of one ticket."""
CHARACTERS_PER_TOKEN = 4
FIRST_VERSION = 1 << 32


def make_trajectories(count: int, shortest_tokens: int, seed: int = 0) -> list[TrajectoryRow]:
    """Prompts and replies of random length in turn; versions grow along the way."""
    generator = np.random.default_rng(seed)
    # Quantiles rather than samples: any seed gives the same lengths, in another order.
    quantiles = (np.arange(count) + 0.5) / count
    lengths = shortest_tokens * (LONGEST_TOKENS / shortest_tokens) ** quantiles
    prose = _prose(seed, CHARACTERS_PER_TOKEN * LONGEST_TOKENS)
    return [
        _trajectory(number, int(length), prose, generator)
        for number, length in enumerate(generator.permutation(lengths))
    ]


def _trajectory(
    number: int, length: int, prose: str, generator: np.random.Generator
) -> TrajectoryRow:
    mask_T = np.zeros(length, np.uint8)
    versions_T = np.full(length, -1, np.int64)
    version = FIRST_VERSION + int(generator.integers(0, 4))
    messages, at = [], 0
    calls: list[CallRecord] = []
    while at < length:
        begin = min(length - 1, at + int(generator.integers(50, 600)))
        end = min(length, begin + int(generator.integers(50, 400)))
        mask_T[begin:end] = 1
        versions_T[begin:end] = version
        version += int(generator.random() < 0.05)
        messages.append({"role": "user", "content": _text(prose, at, begin)})
        messages.append({"role": "assistant", "content": _text(prose, begin, end)})
        calls.append(_call(len(calls), begin, end - begin))
        at = end
    logprobs_T = (-generator.exponential(0.4, length) * mask_T).astype(np.float32)
    return TrajectoryRow(
        ticket_id=number // N_SAMPLES,
        attempt=1,
        episode=number % N_SAMPLES,
        row=0,
        input_ids_T=_ids(generator, length),
        loss_mask_T=mask_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        reward=float(generator.integers(0, 2)),
        record=RowRecord(
            session_id=f"train-{number}",
            task_id=str(number // N_SAMPLES),
            task_index=number // N_SAMPLES,
            cell="cell-0",
            started_at=1.8e9,
            ended_at=1.8e9 + len(calls),
            calls=calls,
        ),
        meta={"messages": messages},
    )


def _call(number: int, prompt_tokens: int, reply_tokens: int) -> CallRecord:
    return CallRecord(
        id=f"chatcmpl-{number:028x}",
        parent_id=f"chatcmpl-{number - 1:028x}" if number else None,
        trained=True,
        reuse="reused" if number else "none",
        asked_at=1.8e9 + number,
        answered_at=1.8e9 + number + 0.5,
        replica=0,
        prompt_tokens=prompt_tokens,
        reply_tokens=reply_tokens,
        cached_tokens=prompt_tokens // 2,
        finish_reason="stop",
        new_messages=1,
        sampling={"temperature": 1.0, "max_new_tokens": 512, "sampling_seed": number},
    )


def _ids(generator: np.random.Generator, length: int) -> npt.NDArray[np.int32]:
    return generator.integers(0, 150_000, length, dtype=np.int32)


def _prose(seed: int, length: int) -> str:
    letters = random.Random(seed).choices(string.ascii_lowercase + " " * 6, k=length)
    return "".join(letters)


def _text(prose: str, begin: int, end: int) -> str:
    return prose[CHARACTERS_PER_TOKEN * begin : CHARACTERS_PER_TOKEN * end]
