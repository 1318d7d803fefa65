"""Index of a checkpoint: which part of which tensor is where in which rank's file. No torch.

Each rank writes one file. It has the numbers that the rank's optimizer steps, column after column:
master weights, both moments, weights. In every column they are in the same order. Behind the
columns stand the CRC-32s of their bytes, block by block.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from areal_hpc.errors import ShardError

CHECKPOINT_FORMAT = 2
CHECKPOINT_INDEX_FILE = "index.json"
DIGEST_BLOCK_BYTES = 1024**2
"""Who needs a part of a file reads whole blocks, which are compared with their digests."""
DIGEST_BYTES = 4

Column = Literal["master", "exp_avg", "exp_avg_sq", "weight"]
NumberType = Literal["float32", "bfloat16"]
BYTES_BY_NUMBER_TYPE: dict[NumberType, int] = {"float32": 4, "bfloat16": 2}


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """A block of a tensor, its numbers one after another in each column of a rank's file."""

    rank: int
    first: int
    """Which of the rank's numbers is the first of the block."""
    offsets: tuple[int, ...]
    """Where in the tensor the block begins, axis by axis."""
    sizes: tuple[int, ...]
    """Its length in each axis: 1 in all but the last two."""


class StoredTensor(msgspec.Struct, frozen=True):
    """A Megatron parameter of all layers and experts."""

    shape: tuple[int, ...]
    pieces: list[TensorPiece]


class RankIndex(msgspec.Struct, frozen=True):
    """What one rank's file holds."""

    count: int
    """Numbers in each column."""
    tensors: dict[str, StoredTensor]


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What all files of a checkpoint hold together."""

    format: int = CHECKPOINT_FORMAT
    optimizer_steps: int
    """Steps that AdamW has counted, the same for every parameter of the policy."""
    critic_steps: int = 0
    """Those that it has counted for a critic, whose tensors lie beside the policy's."""
    columns: dict[Column, NumberType]
    """Columns of every file, in their order. Of float32 weights there are no master weights."""
    counts: list[int]
    """Numbers in each column of a rank's file, rank by rank."""
    tensors: dict[str, StoredTensor]

    def compute_data_bytes(self, rank: int) -> int:
        return compute_data_bytes(self.columns, self.counts[rank])

    def compute_offset_bytes(self, rank: int, column: Column, first: int) -> int:
        """Where in a rank's file one of its numbers is."""
        names = list(self.columns)
        before = {name: self.columns[name] for name in names[: names.index(column)]}
        start = compute_data_bytes(before, self.counts[rank])
        return start + first * BYTES_BY_NUMBER_TYPE[self.columns[column]]


def compute_data_bytes(columns: dict[Column, NumberType], count: int) -> int:
    return count * sum(BYTES_BY_NUMBER_TYPE[type_] for type_ in columns.values())


def count_digest_blocks(data_bytes: int) -> int:
    """Blocks of a file, each with a digest; the last one may be shorter."""
    return -(-data_bytes // DIGEST_BLOCK_BYTES)


def get_rank_file_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.bin"


def merge_rank_indices(
    rank_indices: Sequence[RankIndex],
    columns: dict[Column, NumberType],
    optimizer_steps: int,
    critic_steps: int = 0,
) -> CheckpointIndex:
    """The index of a checkpoint from those of its ranks, in their order.

    Tensors that the ranks do not hold whole, or hold twice, are a defect of ours.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in rank_indices:
        for name, held in part.tensors.items():
            known = tensors.setdefault(name, StoredTensor(held.shape, []))
            assert known.shape == held.shape, name
            known.pieces.extend(held.pieces)
    for name, one in tensors.items():
        count = sum(math.prod(piece.sizes) for piece in one.pieces)
        assert count == math.prod(one.shape), f"{name}: {count} numbers of {one.shape}"
    return CheckpointIndex(
        optimizer_steps=optimizer_steps,
        critic_steps=critic_steps,
        columns=columns,
        counts=[part.count for part in rank_indices],
        tensors=tensors,
    )


def write_checkpoint_index(directory: Path, index: CheckpointIndex) -> None:
    (directory / CHECKPOINT_INDEX_FILE).write_bytes(msgspec.json.encode(index))


def read_index_of_one_checkpoint(directory: Path) -> CheckpointIndex:
    """What the files of a checkpoint hold.

    Raises:
        FileNotFoundError: There is no index.
        ShardError: It is damaged, or of a later format.
    """
    file = directory / CHECKPOINT_INDEX_FILE
    content = file.read_bytes()
    try:
        found = msgspec.json.decode(content, type=_AnyFormat).format
        if found == CHECKPOINT_FORMAT:
            return msgspec.json.decode(content, type=CheckpointIndex)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise build_checkpoint_damage_error(file, error) from error
    raise ShardError(
        f"the checkpoint is of format {found}; this version reads format {CHECKPOINT_FORMAT}",
        key=str(file),
        hint="resume the run with the version of areal_hpc that wrote it",
    )


class _AnyFormat(msgspec.Struct):
    format: int


def build_checkpoint_damage_error(file: Path, reason: object) -> ShardError:
    """The error of a checkpoint with a file that is not as it was written."""
    return ShardError(
        f"a checkpoint cannot be read: {reason}",
        key=str(file),
        hint=f"move {file.parent} aside: the run then goes on from the checkpoint before",
    )
