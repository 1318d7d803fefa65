import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.ledger.tasks.task_stream import (
    TaskSource,
    TaskStream,
    count_block_tickets_by_source,
    derive_seed,
    get_mixed_task_index,
    get_task_index,
)
from areal_hpc.wire.ledger import TicketRef


@given(st.integers(1, 40), st.integers(0, 3), st.integers())
def test_every_pass_visits_every_task_once(n_tasks: int, pass_number: int, seed: int) -> None:
    start = pass_number * n_tasks
    visited = [get_task_index(ticket, n_tasks, seed) for ticket in range(start, start + n_tasks)]
    assert sorted(visited) == list(range(n_tasks))


def test_orders_and_seeds_never_change_between_versions_of_the_package() -> None:
    """A resumed run must go on with the tasks it would have got."""
    tasks = [get_task_index(ticket, 8, 1) for ticket in range(16)]
    assert tasks == [1, 5, 4, 2, 7, 0, 3, 6, 1, 5, 2, 3, 6, 4, 0, 7]
    mixed = [
        get_mixed_task_index(at, (TaskSource(3, 1.0), TaskSource(2, 2.0)), 1) for at in range(12)
    ]
    assert mixed == [3, 4, 2, 4, 1, 3, 4, 0, 3, 4, 3, 1]
    assert derive_seed("train", 0, 1) == 881306757


@pytest.mark.parametrize("parts", [(TaskSource(10),), (TaskSource(3, 1.0), TaskSource(2, 2.0))])
def test_a_reissued_ticket_keeps_its_task_and_its_seed(parts: tuple[TaskSource, ...]) -> None:
    stream = TaskStream(parts, episodes_per_ticket=4, seed=1)
    first, again = (
        stream.build_ticket_grant(TicketRef(17, 1)),
        stream.build_ticket_grant(TicketRef(17, 2)),
    )
    assert (first.task_index, first.seed) == (again.task_index, again.seed)
    assert first.n_episodes == 4
    n_tasks = sum(part.n_tasks for part in parts)
    assert {stream.build_ticket_grant(TicketRef(i, 1)).task_index for i in range(12)} == {
        *range(n_tasks)
    }


sources = st.lists(
    st.builds(TaskSource, n_tasks=st.integers(1, 9), weight=st.floats(0.01, 10.0)),
    min_size=2,
    max_size=4,
).map(tuple)


def source_of(task_index: int, sources: Sequence[TaskSource]) -> int:
    ends = itertools.accumulate(source.n_tasks for source in sources)
    return next(place for place, end in enumerate(ends) if task_index < end)


@given(sources, st.integers())
def test_every_block_holds_each_sources_share(sources: tuple[TaskSource, ...], seed: int) -> None:
    shares = count_block_tickets_by_source(sources)
    block = sum(shares)
    total = sum(source.weight for source in sources)
    tasks = [get_mixed_task_index(ticket, sources, seed) for ticket in range(3 * block)]
    places = [source_of(task, sources) for task in tasks]
    first_task = 0
    for place, (share, source) in enumerate(zip(shares, sources, strict=True)):
        assert share >= 1
        assert abs(share / block - source.weight / total) < 0.003
        for start in (0, block, 2 * block):
            assert places[start : start + block].count(place) == share
        mine = [task for task, its_place in zip(tasks, places, strict=True) if its_place == place]
        whole_pass = range(first_task, first_task + source.n_tasks)
        for start in range(0, len(mine) - source.n_tasks + 1, source.n_tasks):
            assert sorted(mine[start : start + source.n_tasks]) == list(whole_pass)
        first_task += source.n_tasks
