"""Shard format as a table: every dataset, its type and its axis.

`docs/shard-format-v2.md` says what each holds, and what may change.
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
"""Behind the name of a shard under construction. Readers never look at these."""

ALIGNMENT_BYTES = 64
"""Every dataset starts at a multiple of this: aligned for any dtype, should a program map it."""


class Axis(StrEnum):
    """Axis of a dataset: an element for each token, row or ticket."""

    TOKEN = "token"
    ROW = "row"
    ROW_BOUND = "row, plus one"
    META_BYTE = "byte of metadata"
    RECORD_BYTE = "byte of records"
    TOOLS_BYTE = "byte of tool schemas"
    MASK_TOKEN = "token of a sampling mask"


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One contiguous dataset, 1-D but for routes, without chunks or filters."""

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
    DatasetSpec("row", np.dtype("<i4"), Axis.ROW),  # of the episode
    DatasetSpec("reward", np.dtype("<f4"), Axis.ROW),
    DatasetSpec("temperature", np.dtype("<f4"), Axis.ROW),
    DatasetSpec("meta", np.dtype("u1"), Axis.META_BYTE),  # a UTF-8 JSON object a row
    DatasetSpec("meta_offsets", np.dtype("<i8"), Axis.ROW_BOUND),
    DatasetSpec("kind", np.dtype("u1"), Axis.ROW),  # `RowKind`
    DatasetSpec("eval_step", np.dtype("<i8"), Axis.ROW),
    DatasetSpec("record", np.dtype("u1"), Axis.RECORD_BYTE),  # a `RowRecord` a row, JSON
    DatasetSpec("record_offsets", np.dtype("<i8"), Axis.ROW_BOUND),
    DatasetSpec("tools", np.dtype("u1"), Axis.TOOLS_BYTE),  # one JSON object: hash -> schemas
)
"""Written in this order. A reader finds datasets by name and ignores names it does not know."""
MASK_DATASETS = (
    DatasetSpec("sampling_mask", np.dtype("<i4"), Axis.MASK_TOKEN),  # ids
    DatasetSpec("sampling_mask_counts", np.dtype("<u2"), Axis.TOKEN),  # ids of each token
    DatasetSpec("sampling_mask_offsets", np.dtype("<i8"), Axis.ROW_BOUND),
)
"""A shard has all of them, if one of its rows has a `SamplingMask`, or none."""
ROUTES_DATASET = DatasetSpec("routed_experts", np.dtype("u1"), Axis.TOKEN)
"""[token, layer, k], or uint16 in the place of uint8; in a shard of which a row has routes."""
ALL_DATASETS = (*ALWAYS_WRITTEN_DATASETS, *MASK_DATASETS, ROUTES_DATASET)
OFFSETS_BY_JSON_DATASET = {"meta": "meta_offsets", "record": "record_offsets"}
"""Datasets of one JSON object a row, and those that say where each object begins."""

_SHARD_NAME_PATTERN = re.compile(r"([A-Za-z0-9_.-]+)-(\d{6,})\.h5(?:\.tmp)?")


def format_shard_name(writer: str, sequence: int) -> str:
    """The file name of a writer's n-th shard: `cell-0-000012.h5`; ValueError for an odd writer."""
    name = f"{writer}-{sequence:06d}{SHARD_SUFFIX}"
    if not _SHARD_NAME_PATTERN.fullmatch(name):
        raise ValueError(f"a writer is named by letters, digits, '_', '.' and '-', got {writer!r}")
    return name


def parse_shard_name(file_name: str) -> tuple[str, int] | None:
    match = _SHARD_NAME_PATTERN.fullmatch(file_name)
    return (match[1], int(match[2])) if match else None
