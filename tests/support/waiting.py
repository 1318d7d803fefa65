"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], object],
    within_s: float = 60.0,
    why: Callable[[], object] = str,
    *,
    every_s: float = 0.02,
) -> None:
    """Return once the condition holds; fail with what `why` returns if it does not in time."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {within_s} s: {why()}"
        time.sleep(every_s)
