"""Wrote `shard_v2.h5`, once. Never run it again for version 2: old files must open forever."""

import tempfile
from dataclasses import replace
from pathlib import Path

from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.row_record import CallRecord, RowRecord
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow
from tests.golden.make_shard_v1 import WRITER, golden_row
from tests.golden.make_shard_v1 import golden_rows as first_rows

GOLDEN = Path(__file__).with_name("shard_v2.h5")
TOOLS = {"6f0c1a2b3c4d5e6f": [{"type": "function", "function": {"name": "add"}}]}


def golden_rows() -> list[TrajectoryRow]:
    """The rows of version 1, the first with its calls, and one of every other kind."""
    forked, *others = first_rows()
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
