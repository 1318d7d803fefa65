"""When a replica whose updates fail is tried again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_hpc.weights.report import ReplicaKey

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 1800.0
LONGEST_URGENT_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Failures:
    key: ReplicaKey
    """The incarnation that failed last."""
    in_a_row: int
    cost_s: float
    ended_at: float


class Backoff:
    """Keeps replicas that cannot be updated from stopping those that can, and the training.

    The first failure is forgiven: a resend usually mends it. From the second on, a replica is
    tried again after a pause that doubles, and that is longer than the failed try took, so
    that tries take a shrinking share of the time. A restarted one has a shorter pause: it may
    be well.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[str, int], _Failures] = {}

    def due(
        self, keys: Iterable[ReplicaKey], now: float, *, is_urgent: bool = False
    ) -> list[ReplicaKey]:
        """Those of `keys` that may be tried at `now`.

        Args:
            keys: Replicas that lack the weights.
            now: A time of `time.monotonic`.
            is_urgent: No replica has the weights, so there is nothing that a try would hold up.
        """
        longest_s = LONGEST_URGENT_PAUSE_S if is_urgent else LONGEST_PAUSE_S
        return [key for key in keys if now >= self._not_before(key, longest_s)]

    def note(
        self, ok: Iterable[ReplicaKey], failed: Iterable[ReplicaKey], now: float, cost_s: float
    ) -> None:
        """An update that took `cost_s` has ended at `now`."""
        for key in ok:
            self._failures.pop(key.place, None)
        for key in failed:
            past = self._failures.get(key.place)
            in_a_row = past.in_a_row + 1 if past else 1
            self._failures[key.place] = _Failures(key, in_a_row, cost_s, now)

    def _not_before(self, key: ReplicaKey, longest_s: float) -> float:
        past = self._failures.get(key.place)
        if past is None:
            return 0.0
        pause_s = FIRST_PAUSE_S
        if past.in_a_row > 1:
            base_s = max(past.cost_s, FIRST_PAUSE_S) if key == past.key else FIRST_PAUSE_S
            pause_s = base_s * 2.0 ** min(past.in_a_row - 1, 30)
        return past.ended_at + min(pause_s, longest_s)
