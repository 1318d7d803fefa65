"""Index of a checkpoint: which part of which tensor is where in which rank's file. No torch.

Each rank has written one file of plain numbers, row by row, and beside it the digests of that file.
A checkpoint without an index is of format 1: Megatron's, written by versions before.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from areal_hpc.errors import ShardError

FORMAT = 2
INDEX_FILE = "index.json"

TensorType = Literal["float32", "bfloat16"]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A block of a tensor in the file of a rank, its numbers one after another."""

    rank: int
    offset_bytes: int
    offsets: tuple[int, ...]
    """Where in the tensor the block begins, axis by axis."""
    sizes: tuple[int, ...]


class StoredTensor(msgspec.Struct, frozen=True):
    """A whole tensor, of all layers and experts."""

    type: TensorType
    shape: tuple[int, ...]
    pieces: list[Piece]


class RankIndex(msgspec.Struct, frozen=True):
    """What one rank's file holds."""

    size_bytes: int
    tensors: dict[str, StoredTensor]


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What all files of a checkpoint hold together."""

    format: int = FORMAT
    optimizer_steps: int
    """Steps that AdamW has counted, the same for every parameter."""
    file_bytes: list[int]
    """Size of each rank's file."""
    tensors: dict[str, StoredTensor]


class FileDigests(msgspec.Struct, frozen=True):
    """Digests of a rank's file, block by block: who needs a part of it can check that part."""

    block_bytes: int
    crc32s: list[int]


def get_rank_file(directory: Path, rank: int) -> Path:
    """The numbers that one rank has written."""
    return directory / f"rank_{rank:05d}.bin"


def get_digests_file(rank_file: Path) -> Path:
    """Beside a rank's file: its digests."""
    return rank_file.with_suffix(".digests.json")


def merge_rank_indices(parts: Sequence[RankIndex], optimizer_steps: int) -> CheckpointIndex:
    """The index of a checkpoint from those of its ranks, in their order.

    Tensors that the ranks do not hold whole, or hold twice, are a defect of ours.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, held in part.tensors.items():
            known = tensors.setdefault(name, msgspec.structs.replace(held, pieces=[]))
            assert (known.type, known.shape) == (held.type, held.shape), name
            known.pieces.extend(held.pieces)
    for name, one in tensors.items():
        held_count = sum(math.prod(piece.sizes) for piece in one.pieces)
        assert held_count == math.prod(one.shape), f"{name}: {held_count} numbers of {one.shape}"
    return CheckpointIndex(
        optimizer_steps=optimizer_steps,
        file_bytes=[part.size_bytes for part in parts],
        tensors=tensors,
    )


def write_index(directory: Path, index: CheckpointIndex) -> None:
    """Say what the files of a checkpoint hold. Not forced to disk."""
    (directory / INDEX_FILE).write_bytes(msgspec.json.encode(index))


def has_index(directory: Path) -> bool:
    """True for a checkpoint that its ranks have written each a part of."""
    return (directory / INDEX_FILE).exists()


def read_index(directory: Path) -> CheckpointIndex:
    """What the files of a checkpoint hold.

    Raises:
        FileNotFoundError: There is no index.
        ShardError: It is damaged, or of a later format.
    """
    file = directory / INDEX_FILE
    try:
        content = file.read_bytes()
        found = msgspec.json.decode(content, type=_AnyFormat).format
        if found == FORMAT:
            return msgspec.json.decode(content, type=CheckpointIndex)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise build_damage_error(file, error) from error
    raise ShardError(
        f"the checkpoint is of format {found}; this version reads formats 1 to {FORMAT}",
        key=str(file),
        hint="resume the run with the version of areal_hpc that wrote it",
    )


class _AnyFormat(msgspec.Struct):
    format: int


def read_digests(rank_file: Path) -> FileDigests:
    """The digests of a rank's file.

    Raises:
        FileNotFoundError: There are none.
        ShardError: They are damaged.
    """
    file = get_digests_file(rank_file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=FileDigests)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise build_damage_error(file, error) from error


def build_damage_error(file: Path, reason: object) -> ShardError:
    """The error of a checkpoint with a file that is not as it was written."""
    return ShardError(
        f"a checkpoint cannot be read: {reason}",
        key=str(file),
        hint=f"move {file.parent} aside: the run then goes on from the checkpoint before",
    )
