"""Shard format as a table: every dataset, its type and its axis.

`docs/shard-format-v2.md` describes each dataset, and the changes that the format allows.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from h5py import h5t

FORMAT_NAME = "areal-hpc-shard"
FORMAT_VERSION = 2
SHARD_SUFFIX = ".h5"
PARTIAL_SUFFIX = ".tmp"
"""Suffix behind the name of a shard under construction. Readers ignore such files."""

ALIGNMENT_BYTES = 64
"""Divisor of the start of every dataset, so that a program may map it as any dtype."""


class Axis(StrEnum):
    """Axis of a dataset: one element for each token, row, byte or token of a mask."""

    TOKEN = "token"
    ROW = "row"
    ROW_BOUND = "row, plus one"
    META_BYTE = "byte of metadata"
    RECORD_BYTE = "byte of records"
    TOOLS_BYTE = "byte of tool schemas"
    MASK_TOKEN = "token of a sampling mask"


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One contiguous dataset without chunks or filters; 1-D, except for routes."""

    name: str
    dtype: np.dtype[Any]
    axis: Axis
    hdf5_type: h5t.TypeID = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hdf5_type", h5t.py_create(self.dtype))


ALWAYS_WRITTEN_DATASETS = (
    DatasetSpec("input_ids", np.dtype("<i4"), Axis.TOKEN),
    DatasetSpec("loss_mask", np.dtype("u1"), Axis.TOKEN),  # 1: the model sampled the token
    DatasetSpec("logprobs", np.dtype("<f4"), Axis.TOKEN),  # 0 where it did not
    DatasetSpec("versions", np.dtype("<i8"), Axis.TOKEN),  # packed; -1 where it did not
    DatasetSpec("offsets", np.dtype("<i8"), Axis.ROW_BOUND),  # row r: offsets[r]:offsets[r + 1]
    DatasetSpec("ticket_id", np.dtype("<i8"), Axis.ROW),
    DatasetSpec("attempt", np.dtype("<i4"), Axis.ROW),
    DatasetSpec("episode", np.dtype("<i4"), Axis.ROW),
    DatasetSpec("row", np.dtype("<i4"), Axis.ROW),  # number within the episode
    DatasetSpec("reward", np.dtype("<f4"), Axis.ROW),
    DatasetSpec("temperature", np.dtype("<f4"), Axis.ROW),
    DatasetSpec("meta", np.dtype("u1"), Axis.META_BYTE),  # one UTF-8 JSON object per row
    DatasetSpec("meta_offsets", np.dtype("<i8"), Axis.ROW_BOUND),
    DatasetSpec("kind", np.dtype("u1"), Axis.ROW),  # `RowKind`
    DatasetSpec("eval_step", np.dtype("<i8"), Axis.ROW),
    DatasetSpec("record", np.dtype("u1"), Axis.RECORD_BYTE),  # one `RowRecord` per row, as JSON
    DatasetSpec("record_offsets", np.dtype("<i8"), Axis.ROW_BOUND),
    DatasetSpec("tools", np.dtype("u1"), Axis.TOOLS_BYTE),  # one JSON object: hash -> schemas
)
"""Datasets in the order of writing. A reader finds them by name and ignores unknown names."""
MASK_DATASETS = (
    DatasetSpec("sampling_mask", np.dtype("<i4"), Axis.MASK_TOKEN),  # ids
    DatasetSpec("sampling_mask_counts", np.dtype("<u2"), Axis.TOKEN),  # ids of each token
    DatasetSpec("sampling_mask_offsets", np.dtype("<i8"), Axis.ROW_BOUND),
)
"""Datasets of sampling masks: a shard has all three if a row has a `SamplingMask`, else none."""
ROUTES_DATASET = DatasetSpec("routed_experts", np.dtype("u1"), Axis.TOKEN)
"""[token, layer, k], uint8 or uint16; present if a row of the shard has routes."""
ALL_DATASETS = (*ALWAYS_WRITTEN_DATASETS, *MASK_DATASETS, ROUTES_DATASET)
OFFSETS_BY_JSON_DATASET = {"meta": "meta_offsets", "record": "record_offsets"}
"""Dataset of one JSON object per row -> dataset of the bytes at which the objects begin."""

_SHARD_NAME_PATTERN = re.compile(r"([A-Za-z0-9_.-]+)-(\d{6,})\.h5(?:\.tmp)?")


def format_shard_name(writer: str, sequence: int) -> str:
    """Return the name of a writer's n-th shard: `cell-0-000012.h5`; ValueError for a bad writer."""
    name = f"{writer}-{sequence:06d}{SHARD_SUFFIX}"
    if not _SHARD_NAME_PATTERN.fullmatch(name):
        raise ValueError(f"a writer is named by letters, digits, '_', '.' and '-', got {writer!r}")
    return name


def parse_shard_name(file_name: str) -> tuple[str, int] | None:
    match = _SHARD_NAME_PATTERN.fullmatch(file_name)
    return (match[1], int(match[2])) if match else None
