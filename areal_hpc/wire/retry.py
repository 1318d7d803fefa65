"""Retries of calls to services: pauses, a deadline, and the errors that are retried."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from areal_hpc.errors import ClusterError, HttpStatusError

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

RETRYABLE_STATUSES = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling pauses with a limit; iterating yields them in order, without end."""

    min_s: float
    """Seconds before the first retry."""
    max_s: float
    """Longest pause."""

    def get_pause_s(self, retries: int) -> float:
        return min(self.min_s * 2.0 ** min(retries, 60), self.max_s)

    def __iter__(self) -> Iterator[float]:
        return map(self.get_pause_s, count())


SERVICE_BACKOFF = Backoff(0.05, 1.0)


def is_passing(error: ClusterError) -> bool:
    """Return whether the peer was unreachable or busy; it did not refuse the call."""
    return not isinstance(error, HttpStatusError) or error.status in RETRYABLE_STATUSES


def retry(
    call: Callable[[], ResultT],
    within_s: float,
    *,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ResultT:
    """Repeat a call while its peer is unreachable, for `within_s` from the first failure.

    Raises:
        ClusterError: The last failure, or a refusal.
    """
    give_up_at = float("inf")
    for pause_s in SERVICE_BACKOFF:
        try:
            return call()
        except ClusterError as error:
            give_up_at = min(give_up_at, time.monotonic() + within_s)
            if not is_passing(error) or is_stopping() or time.monotonic() >= give_up_at:
                raise
            if pause_s == SERVICE_BACKOFF.max_s:
                log.warning("trying again: %s", error)
        time.sleep(pause_s)
    raise AssertionError("pauses have no end")


async def retry_without_limit(
    call: Callable[[], Awaitable[ResultT]], on_failure: Callable[[ClusterError, float], None]
) -> ResultT:
    """Repeat a call without a limit while its peer is unreachable.

    Raises:
        ClusterError: A refusal.
    """
    import asyncio  # commands that only read runs import this module, but never call this

    for pause_s in SERVICE_BACKOFF:
        try:
            return await call()
        except ClusterError as error:
            if not is_passing(error):
                raise
            on_failure(error, pause_s)
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses have no end")
