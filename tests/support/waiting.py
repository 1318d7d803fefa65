"""Waiting for what other processes and threads do."""

import subprocess
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


def communicate(process: subprocess.Popen[str], within_s: float | None = 60.0) -> tuple[str, str]:
    """What a program writes until it ends; one that does not end in time is killed.

    Raises:
        subprocess.TimeoutExpired: It was.
    """
    deadline = None if within_s is None else Deadline(within_s)
    try:
        while True:
            try:
                left_s = None if deadline is None else max(deadline.left_s, 0.0)
                return process.communicate(timeout=left_s)
            except subprocess.TimeoutExpired:
                if deadline is None or deadline.is_over():
                    raise
    except BaseException:
        process.kill()
        raise
