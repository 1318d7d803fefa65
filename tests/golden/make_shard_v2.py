"""Wrote `shard_v2.h5`, once. Never run it again for version 2: old files must open forever."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.row_record import CallRecord, RowRecord
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow

GOLDEN = Path(__file__).with_name("shard_v2.h5")
WRITER = "golden"
TOOLS = {"6f0c1a2b3c4d5e6f": [{"type": "function", "function": {"name": "add"}}]}


def golden_row(tokens: list[tuple[int, int, float, int]], **rest: Any) -> TrajectoryRow:
    """One row of tokens: id, loss mask, log-probability and version of each."""
    ids, mask, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), (), ())
    return TrajectoryRow(
        input_ids_T=np.array(ids, np.int32),
        loss_mask_T=np.array(mask, np.uint8),
        logprobs_T=np.array(logprobs, np.float32),
        versions_T=np.array(versions, np.int64),
        **rest,
    )


def training_rows() -> list[TrajectoryRow]:
    """Three rows of two tickets: forked history, an update mid-way, no tokens, largest values."""
    version = (2 << 32) + 7  # generation 2, step 7
    prompt = [(151643, 0, 0.0, -1), (0, 0, 0.0, -1)]
    reply = [(2**31 - 1, 1, -0.1, version), (7, 1, -12.5, version), (7, 1, -1e-7, version + 1)]
    meta = {"task_id": "sums/17", "messages": [{"role": "user", "content": "1 + 1 = ? ✓"}]}
    forked = {"ticket_id": 2**40, "attempt": 3, "episode": 1}
    empty = {"ticket_id": 0, "attempt": 0, "episode": 0, "meta": {"finish_reason": None}}
    return [
        golden_row([*prompt, *reply], row=0, reward=0.1, temperature=0.7, meta=meta, **forked),
        golden_row([(5, 1, -2.0, 0)], row=1, reward=-1.0, **forked),
        golden_row([], row=0, reward=0.0, **empty),
    ]


def golden_rows() -> list[TrajectoryRow]:
    """Training rows, the first with its calls, and one of every other kind."""
    forked, *others = training_rows()
    calls = [
        CallRecord(
            id="chatcmpl-1",
            trained=True,
            asked_at=1.8e9,
            first_token_at=1.8e9 + 0.125,
            answered_at=1.8e9 + 0.5,
            replica=3,
            prompt_tokens=2,
            reply_tokens=2,
            cached_tokens=1,
            finish_reason="stop",
            new_messages=1,
            tools="6f0c1a2b3c4d5e6f",
            template_variables={"enable_thinking": False},
            sampling={"temperature": 0.7, "max_new_tokens": 64, "sampling_seed": 11},
        ),
        CallRecord(
            id="chatcmpl-2",
            parent_id="chatcmpl-1",
            reward=Reward(0.1, {"format": 0.1}, {"tool_errors": 2.0}, "almost \u2713"),
            reuse="reused",
            prompt_tokens=4,
            reply_tokens=1,
            finish_reason="length",
        ),
    ]
    episode = RowRecord(
        session_id="train-5-3-1-0a1b",
        task_id="train-5-3-1",
        task_index=17,
        cell="cell-0",
        started_at=1.8e9 - 1,
        ended_at=1.8e9 + 2,
        calls=calls,
    )
    failed = RowRecord(session_id="f", cause="KeyError at agent.py:31", error="no \u2713\n  line")
    untrained = {"attempt": 1000001, "episode": 0, "row": 0, "reward": 0.25, "eval_step": 2**40}
    tokens = [(5, 0, 0.0, -1), (6, 1, -2.0, 7)]
    return [
        replace(forked, record=episode, tool_schemas=TOOLS),
        *others,
        golden_row(
            tokens,
            ticket_id=3,
            kind=RowKind.EVALUATION,
            record=RowRecord(session_id="e"),
            **untrained,
        ),
        golden_row([], ticket_id=4, kind=RowKind.FAILED, record=failed, **untrained),
        golden_row(
            tokens,
            ticket_id=0,
            attempt=0,
            episode=0,
            row=1,
            reward=0.0,
            kind=RowKind.AUXILIARY,
            record=RowRecord(session_id="a"),
        ),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shards_dir = Path(folder)
        shard = write_sealed_shard(golden_rows(), shards_dir, shards_dir / "index", WRITER)
        GOLDEN.write_bytes((shards_dir / shard.file).read_bytes())
