"""Pauses between retries, each twice as long as the one before. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling pauses with a limit; iterate over it for one after the other, without end."""

    min_s: float
    """Seconds before the first retry."""
    max_s: float
    """No pause is longer."""

    def get_pause_s(self, retries: int) -> float:
        return min(self.min_s * 2.0 ** min(retries, 60), self.max_s)

    def __iter__(self) -> Iterator[float]:
        return map(self.get_pause_s, count())
