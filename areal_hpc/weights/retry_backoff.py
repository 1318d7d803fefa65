"""Retry backoff of replicas whose updates fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_hpc.weights.report import ReplicaKey
from areal_hpc.wire.backoff import Backoff

MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 1800.0
MAX_URGENT_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Failures:
    key: ReplicaKey
    """The incarnation that failed last."""
    in_a_row: int
    cost_s: float
    ended_at: float


class UpdateBackoff:
    """Keeps replicas that cannot be updated from stopping those that can, and the training.

    The first failure is forgiven: a resend usually fixes it. From the second on, a replica is
    tried again after a pause that doubles, and that is longer than the failed try took, so
    that tries take a shrinking share of the time. A restarted one has a shorter pause: it may
    be well.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[str, int], _Failures] = {}

    def due(
        self, keys: Iterable[ReplicaKey], now: float, *, is_urgent: bool = False
    ) -> list[ReplicaKey]:
        """Those of `keys` that may be tried at `now`, a time of `time.monotonic`.

        `is_urgent`: no replica has the weights, so there is nothing that a try would hold up.
        """
        longest_s = MAX_URGENT_PAUSE_S if is_urgent else MAX_PAUSE_S
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
        is_costly = past.in_a_row > 1 and key == past.key
        first_s = max(past.cost_s, MIN_PAUSE_S) if is_costly else MIN_PAUSE_S
        return past.ended_at + Backoff(first_s, longest_s).get_pause_s(past.in_a_row - 1)
