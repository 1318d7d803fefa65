"""Time that a machine gave us: what a busy one took away counts against nobody.

For tests whose promise is a number of seconds. Where the promise is that something happens at all,
wait for it; where it is an order of events, look at the events.
"""

from __future__ import annotations

import threading
import time
from typing import Self

TICK_S = 0.01


class FairClock:
    """Measures like `time.monotonic`, but leaves out by how much a sleeping thread woke too late.

    On an idle machine that is a few milliseconds a second. A machine that stops for two seconds
    wakes it two seconds late.
    """

    def __init__(self) -> None:
        self._lost: list[tuple[float, float]] = []
        """When it should have woken, and when it did."""
        self._woke_at = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sleep, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def since(self, began: float) -> float:
        """Seconds from a moment of `time.monotonic` until now."""
        now = time.monotonic()
        while self._woke_at < now:  # a stop that has just ended is known only after it
            time.sleep(TICK_S / 2)
        lost = (min(woke, now) - max(due, began) for due, woke in [*self._lost])
        return now - began - sum(max(0.0, one) for one in lost)

    def _sleep(self) -> None:
        while not self._is_over.is_set():
            due = time.monotonic() + TICK_S
            time.sleep(TICK_S)
            self._woke_at = time.monotonic()
            self._lost.append((due, self._woke_at))
