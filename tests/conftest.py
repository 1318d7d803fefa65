"""What every tier needs: children of tests never outlive them, and the slow tests come first."""

import os
import signal
import threading
from collections import defaultdict
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped]
from hypothesis import settings

from tests.support.deadlines import Deadline, get_slowness
from tests.support.environments import CHECKOUT
from tests.support.file_durations import estimate_s, get_group
from tests.support.thoroughness import is_thorough

SHORTEST_S = 0.001
"""A timer of 0 s is none."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Apptainer as `make slurm-roots` unpacks it, where the machine has none.
os.environ["PATH"] += f"{os.pathsep}{CHECKOUT / '.roots' / 'apptainer' / 'bin'}"
# A shell starts what runs in the background deaf to Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is slow, not wrong: examples have no deadline.
settings.register_profile("fast", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
get_slowness()  # measured before the workers start, and handed down to them


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups come first, so that no worker is left alone with one at the end.

    Tests that are marked `thorough` are left to the thorough profile; those that end what others of
    their module share come `last`.
    """
    if not is_thorough():
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    durations_s: dict[str, float] = defaultdict(float)
    for file in {item.nodeid.partition("::")[0] for item in items}:
        durations_s[get_group(file)] += estimate_s(file)

    def get_place(item: pytest.Item) -> tuple[float, str, bool]:
        group = get_group(item.nodeid)
        return -durations_s[group], group, item.get_closest_marker("last") is not None

    items.sort(key=get_place)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """A slower machine has longer; and longer yet where load has begun since it was measured."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None  # as the plugin does it
    deadline = Deadline(settings.timeout)

    def on_alarm(*_: object) -> None:
        if deadline.is_over():
            late = settings._replace(timeout=deadline.limit_s)
            pytest_timeout.timeout_sigalrm(item, late)
        else:
            signal.setitimer(signal.ITIMER_REAL, max(deadline.left_s, SHORTEST_S))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, max(deadline.left_s, SHORTEST_S))
    return True
