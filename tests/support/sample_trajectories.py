"""Trajectories for tests: one fixed example, and hypothesis strategies."""

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import SealedShard
from areal_hpc.shards.writer import write_sealed_shard
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.trajectory import CallRecord, RowKind, RowRecord, SamplingMask, TrajectoryRow


def trajectory(
    ticket_id: int = 0, episode: int = 0, *, tokens: int = 6, reward: float = 1.0
) -> TrajectoryRow:
    """Half prompt, half sampled; every value depends on the arguments."""
    position = np.arange(tokens)
    mask = (position >= tokens // 2).astype(np.uint8)
    return TrajectoryRow(
        ticket_id=ticket_id,
        attempt=1,
        episode=episode,
        row=0,
        input_ids_T=(1000 * ticket_id + 100 * episode + position).astype(np.int32),
        loss_mask_T=mask,
        logprobs_T=(-0.25 * position * mask).astype(np.float32),
        versions_T=np.where(mask, (1 << 32) + ticket_id, -1).astype(np.int64),
        reward=reward,
        temperature=0.5,
        meta={"task_id": f"task-{ticket_id}", "messages": [{"role": "user", "content": "Grüße"}]},
    )


def plain_row(
    loss_mask: Sequence[int],
    ticket_id: int = 0,
    episode: int = 0,
    reward: float = 1.0,
    versions: Sequence[int] | None = None,
) -> TrajectoryRow:
    """Tokens 0, 1 and so on, sampled where the mask has a 1; log-probabilities are 0."""
    size = len(loss_mask)
    return TrajectoryRow(
        ticket_id=ticket_id,
        attempt=1,
        episode=episode,
        row=0,
        input_ids_T=np.arange(size, dtype=np.int32),
        loss_mask_T=np.array(loss_mask, np.uint8),
        logprobs_T=np.zeros(size, np.float32),
        versions_T=np.full(size, -1) if versions is None else np.array(versions, np.int64),
        reward=reward,
    )


def ticket(ticket_id: int, n_samples: int = 2) -> list[TrajectoryRow]:
    return [trajectory(ticket_id, episode, reward=float(episode)) for episode in range(n_samples)]


def seal_in(paths: RunPaths, rows: list[TrajectoryRow], writer: str = "cell-0") -> SealedShard:
    return write_sealed_shard(rows, paths.shards_dir, paths.shard_index_dir, writer)


def fields(row: TrajectoryRow) -> dict[str, object]:
    """A trajectory as plain values, comparable with `==`."""
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    if (mask := values.pop("sampling_mask")) is not None:
        values |= {"mask_counts": mask.counts_T, "mask_ids": mask.ids}
    if values["routes_TLK"] is None:  # files of before have none
        del values["routes_TLK"]
    return {
        name: (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)

_CALLS = st.builds(
    CallRecord,
    id=st.text(max_size=5),
    reward=st.none() | st.builds(Reward, _FLOAT32, note=st.text(string.printable, max_size=5)),
    asked_at=st.floats(0, 2e9),
    replica=st.integers(-1, 9),
    sampling=st.dictionaries(st.text(string.printable, max_size=3), st.floats(0, 1), max_size=2),
)
_RECORDS = st.builds(
    RowRecord,
    session_id=st.sampled_from("abc"),
    task_index=st.integers(-1, 2**62),
    calls=st.lists(_CALLS, max_size=3),
    error=st.text(string.printable, max_size=5),
)


@st.composite
def trajectories(draw: st.DrawFn) -> TrajectoryRow:
    length = draw(st.integers(0, 40))

    def tokens(values: st.SearchStrategy[object], dtype: str) -> npt.NDArray[Any]:
        return np.array(draw(st.lists(values, min_size=length, max_size=length)), dtype)

    loss_mask_T = tokens(st.integers(0, 1), "u1")
    input_ids_T = tokens(st.integers(0, 2**31 - 1), "<i4")
    others = st.lists(st.integers(0, 2**31 - 1), max_size=3)
    kept = [
        [own, *draw(others)] if sampled and draw(st.booleans()) else []
        for own, sampled in zip(input_ids_T.tolist(), loss_mask_T.tolist(), strict=True)
    ]
    mask = SamplingMask(
        np.array(list(map(len, kept)), "<u2"), np.array([i for ids in kept for i in ids], "<i4")
    )
    versions_T = tokens(st.integers(0, 2**62), "<i8")
    return TrajectoryRow(
        ticket_id=draw(st.integers(0, 2**62)),
        attempt=draw(st.integers(0, 2**31 - 1)),
        episode=draw(st.integers(0, 2**31 - 1)),
        row=draw(st.integers(0, 2**31 - 1)),
        input_ids_T=input_ids_T,
        loss_mask_T=loss_mask_T,
        logprobs_T=tokens(_FLOAT32, "<f4"),
        versions_T=np.where(loss_mask_T, versions_T, -1),
        reward=draw(_FLOAT32),
        temperature=draw(st.floats(0, 2, width=32)),
        kind=draw(st.sampled_from(RowKind)),
        eval_step=draw(st.integers(-1, 2**62)),
        record=draw(_RECORDS),
        meta=draw(st.dictionaries(st.text(string.printable), _JSON, max_size=3)),
        sampling_mask=mask if len(mask.ids) and draw(st.booleans()) else None,
    )
