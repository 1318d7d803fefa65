"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable

from tests.support.deadlines import Deadline


def wait_for(
    condition: Callable[[], object],
    within_s: float = 60.0,
    why: Callable[[], object] = str,
    *,
    every_s: float = 0.02,
) -> None:
    """Return once the condition holds; fail with what `why` returns if it does not in time.

    A slower machine has longer.
    """
    deadline = Deadline(within_s)
    while not condition():
        assert not deadline.is_over(), f"not within {deadline.limit_s:.4g} s: {why()}"
        time.sleep(every_s)
