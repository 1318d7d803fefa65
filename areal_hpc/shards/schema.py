"""Shard format v1 as a table: what every dataset holds, how long it is, and what may change.

`docs/shard-format-v1.md` explains the same table to people who write other readers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

FORMAT = "areal-hpc-shard"
FORMAT_VERSION = 1
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


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One 1-D contiguous dataset, without chunks or filters."""

    name: str
    dtype: np.dtype[Any]
    axis: Axis
    holds: str


DATASETS = (
    DatasetSpec("input_ids", np.dtype("<i4"), Axis.TOKEN, "token ids, all rows one after another"),
    DatasetSpec(
        "loss_mask", np.dtype("u1"), Axis.TOKEN, "1 where the model sampled the token, else 0"
    ),
    DatasetSpec(
        "logprobs", np.dtype("<f4"), Axis.TOKEN, "log-probability of a sampled token, else 0"
    ),
    DatasetSpec("versions", np.dtype("<i8"), Axis.TOKEN, "packed weight version, else -1"),
    DatasetSpec(
        "offsets", np.dtype("<i8"), Axis.ROW_BOUND, "row r is tokens offsets[r]:offsets[r+1]"
    ),
    DatasetSpec("ticket_id", np.dtype("<i8"), Axis.ROW, "the ticket the row belongs to"),
    DatasetSpec("attempt", np.dtype("<i4"), Axis.ROW, "which issue of the ticket"),
    DatasetSpec("episode", np.dtype("<i4"), Axis.ROW, "which episode of the ticket, from 0"),
    DatasetSpec("row", np.dtype("<i4"), Axis.ROW, "which row of the episode, from 0"),
    DatasetSpec("reward", np.dtype("<f4"), Axis.ROW, "finite reward"),
    DatasetSpec("temperature", np.dtype("<f4"), Axis.ROW, "sampling temperature"),
    DatasetSpec(
        "meta", np.dtype("u1"), Axis.META_BYTE, "one UTF-8 JSON object a row, concatenated"
    ),
    DatasetSpec(
        "meta_offsets", np.dtype("<i8"), Axis.ROW_BOUND, "row r is meta[meta_offsets[r]:...[r+1]]"
    ),
)
"""Written in this order. A reader finds datasets by name and ignores names it does not know."""

_NAME = re.compile(r"([A-Za-z0-9_.-]+)-(\d{6,})\.h5(?:\.tmp)?")


def format_shard_name(writer: str, sequence: int) -> str:
    """The file name of a writer's n-th shard: `cell-0-000012.h5`.

    Raises:
        ValueError: The writer's name cannot be part of a file name.
    """
    name = f"{writer}-{sequence:06d}{SHARD_SUFFIX}"
    if not _NAME.fullmatch(name):
        raise ValueError(f"a writer is named by letters, digits, '_', '.' and '-', got {writer!r}")
    return name


def parse_shard_name(name: str) -> tuple[str, int] | None:
    """Writer and sequence of a shard or of a shard under construction; None for other files."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None
