"""Rows of `shard_v1.h5`, which the writer of version 1 made of them: old files open forever."""

from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.wire.trajectory import TrajectoryRow

GOLDEN = Path(__file__).with_name("shard_v1.h5")
WRITER = "golden"


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


def golden_rows() -> list[TrajectoryRow]:
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
