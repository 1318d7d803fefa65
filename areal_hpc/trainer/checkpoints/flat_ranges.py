"""Ranges of a flattened tensor as blocks of the tensor. Pure.

A distributed optimizer gives each rank consecutive numbers of a parameter, wherever rows begin.
Cut into blocks they have places in the tensor, which another layout can ask for.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor: where it begins and how long it is, axis by axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Numbers in the block."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The block as an index of the tensor."""
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(self.offsets, self.sizes, strict=True)
        )

    def shift_from_within_to_whole(self, outer: "Box") -> "Box":
        """The same block, given within `outer`, in the tensor that `outer` is a block of.

        That tensor may have further axes in front, in which `outer` has the length 1.
        """
        added = (0,) * (len(outer.offsets) - len(self.offsets))
        offsets = map(sum, zip(outer.offsets, added + self.offsets, strict=True))
        return Box(tuple(offsets), tuple(1 for _ in added) + self.sizes)

    def shift_to_coordinates_within(self, outer: "Box") -> "Box":
        """The same block, seen from where `outer` begins."""
        pairs = zip(self.offsets, outer.offsets, strict=True)
        return Box(tuple(own - base for own, base in pairs), self.sizes)


def split_flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The blocks, in order, that numbers `start` to `stop` of a flattened tensor make up.

    Each block's numbers are consecutive; of a matrix there are three at most.
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
    """The matrices of a block, in order: one of each index in the axes before the last two."""
    split = len(box.sizes[:-2])
    steps = [range(at, at + size) for at, size in zip(*(part[:split] for part in box), strict=True)]
    for indices in itertools.product(*steps):
        yield Box(indices + box.offsets[split:], (1,) * split + box.sizes[split:])


def intersect_boxes(first: Box, second: Box) -> Box | None:
    """The block that two blocks of a tensor have in common."""
    starts = tuple(map(max, first.offsets, second.offsets))
    stops = tuple(
        min(a + a_size, b + b_size) for a, a_size, b, b_size in zip(*first, *second, strict=True)
    )
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        return None
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def compute_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    lengths = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(reversed(list(lengths)))[-len(shape) :] if shape else ()


def compute_flat_start_and_extent(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Where a block begins in a flattened tensor, and how many numbers its last is after that."""
    strides = compute_strides(shape)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    last = sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
    return first, last + 1
