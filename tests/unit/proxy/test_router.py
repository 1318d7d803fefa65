"""Where sessions are at home: little load first, then what they have in common."""

import pytest

from areal_hpc.proxy.engine.router import choose_home_replica


@pytest.mark.parametrize(
    ("load", "together", "home"),
    [
        ({}, {}, 0),
        ({0: 1}, {}, 1),
        ({0: 12, 1: 10}, {0: 3}, 0),
        ({0: 13, 1: 10}, {0: 3}, 1),
        ({0: 10, 1: 10}, {0: 3, 1: 4}, 1),
        ({0: 10, 1: 10}, {0: 3, 1: 3}, 0),
    ],
)
def test_what_a_session_knows_is_preferred_where_the_load_is_even(
    load: dict[int, int], together: dict[int, int], home: int
) -> None:
    assert choose_home_replica([0, 1], load, together) == home


def test_only_replicas_that_may_be_asked_are_chosen() -> None:
    assert choose_home_replica([2, 3], {2: 5, 3: 4}, {0: 9}) == 3
