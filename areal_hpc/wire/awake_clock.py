"""Clock that does not advance while its process is stopped.

A process that is stopped, waits for storage or is on a frozen node receives nothing. By the wall
clock every server would seem silent and every sender late. This clock leaves such pauses out.
"""

import threading
import time
from collections.abc import Callable

MAX_GAP_S = 3.0
"""Longest time between two reads of a process that was awake. Users read ten times as often."""


class AwakeClock:
    """Seconds in which the process was awake, counted like `time.monotonic`. Safe for threads."""

    def __init__(self, read_s: Callable[[], float] = time.monotonic) -> None:
        self._read_s = read_s
        self._lock = threading.Lock()
        self._last_s = read_s()
        self._paused_s = 0.0
        self._woke_at_s = 0.0

    def now(self) -> float:
        with self._lock:
            now_s = self._read_s()
            gap_s, self._last_s = now_s - self._last_s, now_s
            if gap_s > MAX_GAP_S:
                self._paused_s += gap_s
                self._woke_at_s = now_s - self._paused_s
            return now_s - self._paused_s

    @property
    def woke_at_s(self) -> float:
        """Time, by this clock, at which the last pause ended; 0 if there was none."""
        return self._woke_at_s
