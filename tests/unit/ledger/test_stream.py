from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.ledger.stream import TaskStream, seed_of, task_of
from areal_hpc.wire.ledger import TicketRef


@given(st.integers(1, 40), st.integers(0, 3), st.integers())
def test_every_pass_visits_every_task_once(n_tasks: int, pass_number: int, seed: int) -> None:
    start = pass_number * n_tasks
    visited = [task_of(ticket, n_tasks, seed) for ticket in range(start, start + n_tasks)]
    assert sorted(visited) == list(range(n_tasks))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(task_of(50 * pass_number + i, 50, seed) for i in range(50))
        for pass_number in range(3)
        for seed in range(3)
    }
    assert len(orders) == 9


def test_the_order_never_changes_between_versions_of_the_package() -> None:
    """A resumed run must go on with the tasks it would have got."""
    assert [task_of(ticket, 8, 1) for ticket in range(16)] == [
        1,
        5,
        4,
        2,
        7,
        0,
        3,
        6,
        1,
        5,
        2,
        3,
        6,
        4,
        0,
        7,
    ]
    assert seed_of("train", 0, 1) == 881306757


def test_seeds_differ_by_ticket_stream_and_run() -> None:
    seeds = Counter(
        seed_of(stream, i, seed)
        for stream in ("train", "eval")
        for i in range(500)
        for seed in (1, 2)
    )
    assert max(seeds.values()) == 1
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_re_issued_ticket_is_the_same_task_with_the_same_seed() -> None:
    stream = TaskStream(n_train_tasks=10, n_samples=4, seed=3)
    first, again = stream.grant(TicketRef(17, 1)), stream.grant(TicketRef(17, 2))
    assert (first.task_index, first.seed) == (again.task_index, again.seed)
    assert first.n_samples == 4


def test_an_evaluation_ticket_is_one_episode_of_the_task_it_names() -> None:
    grant = TaskStream(n_train_tasks=10, n_samples=4, seed=3).grant(TicketRef(2, 1, 40))
    assert (grant.task_index, grant.n_samples) == (2, 1)
