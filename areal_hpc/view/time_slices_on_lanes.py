"""Slices of time, on lanes where they do not overlap. Pure."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time with a name, in Unix seconds."""

    name: str
    begin: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def assign_lanes(slices: Sequence[Slice]) -> list[int]:
    """A lane for each slice, from 0: as few as may be, so that no two of a lane overlap."""
    lanes = [0] * len(slices)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    opened = 0
    for place in sorted(range(len(slices)), key=lambda one: slices[one].begin):
        while busy and busy[0][0] <= slices[place].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lanes[place] = heapq.heappop(free)
        else:
            lanes[place], opened = opened, opened + 1
        heapq.heappush(busy, (slices[place].end, lanes[place]))
    return lanes


def iterate_counts_under_way(slices: Sequence[Slice]) -> Iterator[tuple[float, int]]:
    """Each moment at which the number of slices under way changes, with the number."""
    changes: dict[float, int] = {}
    for one in slices:
        changes[one.begin] = changes.get(one.begin, 0) + 1
        changes[one.end] = changes.get(one.end, 0) - 1
    count = 0
    for at in sorted(changes):
        count += changes[at]
        yield at, count
