"""Choice of a matrix's cases: representatives, or in the thorough profile all of it.

`make nightly` runs the tests with HYPOTHESIS_PROFILE=thorough.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def is_thorough() -> bool:
    return os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def choose(every: Iterable[T], *representatives: T) -> list[T]:
    """Choose all cases in the thorough profile, else those that represent them."""
    cases = list(every)
    assert all(case in cases for case in representatives)
    return cases if is_thorough() else list(representatives)
