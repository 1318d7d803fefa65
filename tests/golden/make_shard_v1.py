"""Wrote `shard_v1.h5`, once. Never run it again for version 1: old files must open forever."""

import tempfile
from pathlib import Path

import numpy as np

from areal_hpc.shards.writer import seal_shard
from areal_hpc.wire.trajectory import Trajectory

GOLDEN = Path(__file__).with_name("shard_v1.h5")
WRITER = "golden"


def golden_rows() -> list[Trajectory]:
    """Three rows of two tickets: forked history, an update mid-way, no tokens, largest values."""
    generation_2_step_7 = (2 << 32) + 7
    return [
        Trajectory(
            ticket_id=2**40,
            attempt=3,
            episode=1,
            row=0,
            input_ids_T=np.array([151643, 0, 2**31 - 1, 7, 7], np.int32),
            loss_mask_T=np.array([0, 0, 1, 1, 1], np.uint8),
            logprobs_T=np.array([0, 0, -0.1, -12.5, -1e-7], np.float32),
            versions_T=np.array(
                [-1, -1, generation_2_step_7, generation_2_step_7, generation_2_step_7 + 1],
                np.int64,
            ),
            reward=0.1,
            temperature=0.7,
            meta={"task_id": "sums/17", "messages": [{"role": "user", "content": "1 + 1 = ? ✓"}]},
        ),
        Trajectory(
            ticket_id=2**40,
            attempt=3,
            episode=1,
            row=1,
            input_ids_T=np.array([5], np.int32),
            loss_mask_T=np.array([1], np.uint8),
            logprobs_T=np.array([-2.0], np.float32),
            versions_T=np.array([0], np.int64),
            reward=-1.0,
        ),
        Trajectory(
            ticket_id=0,
            attempt=0,
            episode=0,
            row=0,
            input_ids_T=np.array([], np.int32),
            loss_mask_T=np.array([], np.uint8),
            logprobs_T=np.array([], np.float32),
            versions_T=np.array([], np.int64),
            reward=0.0,
            meta={"finish_reason": None},
        ),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shards_dir = Path(folder)
        shard = seal_shard(golden_rows(), shards_dir, shards_dir / "index", WRITER)
        GOLDEN.write_bytes((shards_dir / shard.file).read_bytes())
