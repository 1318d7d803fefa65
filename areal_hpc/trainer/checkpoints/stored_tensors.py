"""Tensors of a checkpoint, of which any block can be read: no ranks, no groups, no network.

A checkpoint stores each Megatron parameter of all layers (and experts) as one tensor with a
dimension for the layer (and the expert), in pieces that depend on the layout that wrote it.
A parameter's master weights and moments have the same shape, in separate columns.
"""

import itertools
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from areal_hpc.errors import ShardError
from areal_hpc.rundir.checkpoints import (
    BYTES_BY_NUMBER_TYPE,
    DIGEST_BLOCK_BYTES,
    DIGEST_BYTES,
    Column,
    TensorPiece,
    build_checkpoint_damage_error,
    count_digest_blocks,
    get_rank_file_path,
    read_checkpoint_index,
)

TORCH_DTYPE_BY_NUMBER_TYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Box(NamedTuple):
    """Block of a tensor: its offset and its size along each axis.

    A distributed optimizer gives each rank consecutive numbers of a parameter, regardless of rows.
    Divided into blocks they have positions in the tensor, which another layout can read.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the tensor that selects the block."""
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(self.offsets, self.sizes, strict=True)
        )

    def shift_from_within_to_whole(self, outer: "Box") -> "Box":
        """Translate this block from coordinates within `outer` to those of the whole tensor.

        The whole tensor may have further leading axes, in which `outer` has the length 1.
        """
        added = (0,) * (len(outer.offsets) - len(self.offsets))
        offsets = map(sum, zip(outer.offsets, added + self.offsets, strict=True))
        return Box(tuple(offsets), tuple(1 for _ in added) + self.sizes)

    def shift_to_coordinates_within(self, outer: "Box") -> "Box":
        """Translate this block to coordinates relative to the start of `outer`."""
        pairs = zip(self.offsets, outer.offsets, strict=True)
        return Box(tuple(offset - base for offset, base in pairs), self.sizes)


def split_flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the blocks, in order, that cover numbers `start` to `stop` of a flattened tensor.

    Each block's numbers are consecutive; a matrix has at most three such blocks.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, begun = divmod(start, row)
    last, ended = divmod(stop, row)
    if first == last:
        return _split_flat_range_of_row(shape, first, begun, ended)
    boxes = []
    if begun:
        boxes += _split_flat_range_of_row(shape, first, begun, row)
        first += 1
    if first < last:
        whole = (0,) * (len(shape) - 1)
        boxes.append(Box((first, *whole), (last - first, *shape[1:])))
    return boxes + _split_flat_range_of_row(shape, last, 0, ended)


def _split_flat_range_of_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    within = split_flat_range(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in within]


def split_into_matrices(box: Box) -> Iterator[Box]:
    """Yield a block's matrices in order: one for each index of the axes before the last two."""
    split = len(box.sizes[:-2])
    axes = zip(*(part[:split] for part in box), strict=True)
    steps = [range(offset, offset + size) for offset, size in axes]
    for indices in itertools.product(*steps):
        yield Box(indices + box.offsets[split:], (1,) * split + box.sizes[split:])


def intersect_boxes(first: Box, second: Box) -> Box | None:
    starts = tuple(map(max, first.offsets, second.offsets))
    stops = tuple(
        min(a + a_size, b + b_size) for a, a_size, b, b_size in zip(*first, *second, strict=True)
    )
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        return None
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


class RankFileReader:
    """Reader of one rank's file in a complete checkpoint.

    Raises:
        FileNotFoundError: The file does not exist.
        ShardError: Its size differs from that in the index.
    """

    def __init__(self, path: Path, data_bytes: int) -> None:
        self._path = path
        self._data_bytes = data_bytes
        self._kept_at = 0
        self._kept = bytearray()
        self._file = os.open(path, os.O_RDONLY)
        try:
            size_bytes = os.fstat(self._file).st_size
            expected = data_bytes + count_digest_blocks(data_bytes) * DIGEST_BYTES
            if size_bytes != expected:
                raise build_checkpoint_damage_error(
                    path, f"the file has {size_bytes} bytes, by the index it has {expected}"
                )
            digests = bytearray(count_digest_blocks(data_bytes) * DIGEST_BYTES)
            self._read_bytes(memoryview(digests), data_bytes)
        except (OSError, ShardError):
            os.close(self._file)
            raise
        self._digests = np.frombuffer(digests, "<u4")

    def close(self) -> None:
        os.close(self._file)

    def read(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Read bytes of the columns, after comparing their blocks with their digests.

        The last block is kept: the next read often begins in it.
        """
        stop = offset_bytes + size_bytes
        first = offset_bytes // DIGEST_BLOCK_BYTES * DIGEST_BLOCK_BYTES
        blocks = bytearray(
            min(count_digest_blocks(stop) * DIGEST_BLOCK_BYTES, self._data_bytes) - first
        )
        known = len(self._kept) if first == self._kept_at else 0
        if known >= len(blocks):
            return memoryview(self._kept)[offset_bytes - first : stop - first]
        blocks[:known] = self._kept[:known]
        self._read_sound_blocks(memoryview(blocks)[known:], first + known)
        self._kept_at = (stop - 1) // DIGEST_BLOCK_BYTES * DIGEST_BLOCK_BYTES
        self._kept = blocks[self._kept_at - first :]
        return memoryview(blocks)[offset_bytes - first : stop - first]

    def _read_sound_blocks(self, target: memoryview, offset_bytes: int) -> None:
        self._read_bytes(target, offset_bytes)
        for start in range(0, len(target), DIGEST_BLOCK_BYTES):
            block = target[start : start + DIGEST_BLOCK_BYTES]
            digest = zlib.crc32(block)
            expected = int(self._digests[(offset_bytes + start) // DIGEST_BLOCK_BYTES])
            if digest != expected:
                raise build_checkpoint_damage_error(
                    self._path,
                    f"the {len(block)} bytes from byte {offset_bytes + start} on have the digest "
                    f"crc32:{digest:08x}, they were written with crc32:{expected:08x}",
                )

    def _read_bytes(self, target: memoryview, offset_bytes: int) -> None:
        done = 0
        while done < len(target):
            taken = os.preadv(self._file, [target[done:]], offset_bytes + done)
            if taken == 0:
                raise build_checkpoint_damage_error(
                    self._path, f"it ends at byte {offset_bytes + done}"
                )
            done += taken


class StoredTensors:
    """Tensors of a checkpoint: one file per rank, and one index of all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = read_checkpoint_index(directory)
        self._readers: dict[int, RankFileReader] = {}
        self._pieces: dict[tuple[str, tuple[int, ...]], list[TensorPiece]] = defaultdict(list)
        """Pieces by tensor, layer and expert: one tensor can have thousands."""
        for name, tensor in self._index.tensors.items():
            for piece in tensor.pieces:
                self._pieces[name, piece.offsets[:-2]].append(piece)

    def count_optimizer_steps(self, prefix: str = "") -> int:
        return self._index.critic_steps if prefix else self._index.optimizer_steps

    @property
    def weight_dtype(self) -> torch.dtype:
        return TORCH_DTYPE_BY_NUMBER_TYPE[self._index.columns["weight"]]

    @property
    def has_master_weights(self) -> bool:
        return "master" in self._index.columns

    def find_shape(self, tensor_name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; () if it does not exist."""
        tensor = self._index.tensors.get(tensor_name)
        return tensor.shape if tensor else ()

    def read_block(self, column: Column, tensor_name: str, box: Box, target: torch.Tensor) -> None:
        """Read a block of a tensor from all ranks' files into `target`, of the same sizes."""
        assert all(size == 1 for size in box.sizes[:-2]), box
        for piece in self._pieces[tensor_name, box.offsets[:-2]]:
            whole = Box(piece.offsets, piece.sizes)
            if (common := intersect_boxes(whole, box)) is not None:
                target_box = common.shift_to_coordinates_within(box)
                piece_box = common.shift_to_coordinates_within(whole)
                target[target_box.slices].copy_(self._read_part_of_piece(column, piece, piece_box))

    def _read_part_of_piece(self, column: Column, piece: TensorPiece, box: Box) -> torch.Tensor:
        # A view without memory knows where the block lies in the flattened piece.
        view = torch.empty(piece.sizes, device="meta")[box.slices]
        first, strides = piece.first + int(view.storage_offset()), view.stride()
        count = 1 + sum((size - 1) * step for size, step in zip(box.sizes, strides, strict=True))
        type_ = self._index.columns[column]
        offset_bytes = self._index.compute_offset_bytes(piece.rank, column, first)
        data = self._open_file(piece.rank).read(offset_bytes, count * BYTES_BY_NUMBER_TYPE[type_])
        flat = torch.frombuffer(data, dtype=TORCH_DTYPE_BY_NUMBER_TYPE[type_])
        return flat.as_strided(box.sizes, strides)

    def _open_file(self, rank: int) -> RankFileReader:
        if rank not in self._readers:
            self._readers[rank] = RankFileReader(
                get_rank_file_path(self._directory, rank), self._index.compute_data_bytes(rank)
            )
        return self._readers[rank]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


@contextmanager
def open_stored_tensors(directory: Path) -> Iterator[StoredTensors]:
    stored = StoredTensors(directory)
    try:
        yield stored
    finally:
        stored.close()
