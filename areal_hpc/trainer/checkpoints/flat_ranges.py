"""Ranges of a flattened tensor as blocks of the tensor. Pure.

A distributed optimizer gives each rank consecutive numbers of a parameter, wherever rows begin.
Cut into blocks they have places in the tensor, which another layout can ask for.
"""

import math
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor: where it begins and how long it is, axis by axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Numbers in the block."""
        return math.prod(self.sizes)

    def shift(self, offsets: tuple[int, ...]) -> "Box":
        """The same block where the tensor itself begins at `offsets` of a larger one.

        The larger one may have further axes in front.
        """
        added = len(offsets) - len(self.offsets)
        own = (*(0 for _ in range(added)), *self.offsets)
        moved = tuple(base + offset for base, offset in zip(offsets, own, strict=True))
        return Box(moved, (*(1 for _ in range(added)), *self.sizes))


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
        return _split_row(shape, first, begun, ended)
    boxes = []
    if begun:
        boxes += _split_row(shape, first, begun, row)
        first += 1
    if first < last:
        whole = (0,) * (len(shape) - 1)
        boxes.append(Box((first, *whole), (last - first, *shape[1:])))
    return boxes + _split_row(shape, last, 0, ended)


def _split_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    within = split_flat_range(shape[1:], start, stop)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in within]


def intersect(one: Box, other: Box) -> Box | None:
    """The block that two blocks of a tensor have in common."""
    starts = tuple(map(max, one.offsets, other.offsets))
    stops = tuple(
        min(a + a_size, b + b_size)
        for a, a_size, b, b_size in zip(*one, *other, strict=True)
    )
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        return None
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))
