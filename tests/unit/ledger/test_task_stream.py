import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import AgentError
from areal_hpc.ledger.task_stream import (
    Curriculum,
    TaskSource,
    TaskStream,
    WeighTasks,
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
    """A resumed run must continue with the tasks that it would have got."""
    tasks = [get_task_index(ticket, 8, 1) for ticket in range(16)]
    assert tasks == [1, 5, 4, 2, 7, 0, 3, 6, 1, 5, 2, 3, 6, 4, 0, 7]
    mixed = [
        get_mixed_task_index(i, (TaskSource(3, 1.0), TaskSource(2, 2.0)), 1) for i in range(12)
    ]
    assert mixed == [3, 4, 2, 4, 1, 3, 4, 0, 3, 4, 3, 1]
    assert derive_seed("train", 0, 1) == 881306757


@pytest.mark.parametrize("parts", [(TaskSource(10),), (TaskSource(3, 1.0), TaskSource(2, 2.0))])
def test_a_reissued_ticket_keeps_its_task_and_its_seed(parts: tuple[TaskSource, ...]) -> None:
    stream = TaskStream(parts, episodes_per_ticket=4, seed=1)
    first, second = (
        stream.build_ticket_grant(TicketRef(17, 1)),
        stream.build_ticket_grant(TicketRef(17, 2)),
    )
    assert (first.task_index, first.seed) == (second.task_index, second.seed)
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
    return next(index for index, end in enumerate(ends) if task_index < end)


@given(sources, st.integers())
def test_every_block_holds_each_sources_share(sources: tuple[TaskSource, ...], seed: int) -> None:
    shares = count_block_tickets_by_source(sources)
    block = sum(shares)
    total = sum(source.weight for source in sources)
    tasks = [get_mixed_task_index(ticket, sources, seed) for ticket in range(3 * block)]
    places = [source_of(task, sources) for task in tasks]
    first_task = 0
    for index, (share, source) in enumerate(zip(shares, sources, strict=True)):
        assert share >= 1
        assert abs(share / block - source.weight / total) < 0.003
        for start in (0, block, 2 * block):
            assert places[start : start + block].count(index) == share
        mine = [task for task, chosen in zip(tasks, places, strict=True) if chosen == index]
        whole_pass = range(first_task, first_task + source.n_tasks)
        for start in range(0, len(mine) - source.n_tasks + 1, source.n_tasks):
            assert sorted(mine[start : start + source.n_tasks]) == list(whole_pass)
        first_task += source.n_tasks


def evenly(known: dict[str, Any]) -> Any:
    return np.ones(len(known["reward"]))


def curriculum(path: Path, weigh: WeighTasks = evenly, batch_size: int = 3) -> Curriculum:
    return Curriculum(path / "curriculum.jsonl", weigh, n_tasks=6, batch_size=batch_size, seed=5)


def test_a_ticket_keeps_its_task_and_a_torn_line_is_drawn_again(tmp_path: Path) -> None:
    first = curriculum(tmp_path)
    tasks = [first.choose_task(ticket) for ticket in (0, 4, 2, 11)]
    with (tmp_path / "curriculum.jsonl").open("ab") as stream:
        stream.write(b'{"first_ticket":12,"ta')
    second = curriculum(tmp_path, weigh=lambda known: np.eye(6)[0])
    assert [second.choose_task(ticket) for ticket in (11, 2, 4, 0)] == tasks[::-1]
    assert second.choose_task(12) == 0
    assert curriculum(tmp_path).choose_task(12) == 0


def test_a_batch_has_each_task_once_unless_too_few_have_weight(tmp_path: Path) -> None:
    even = curriculum(tmp_path, batch_size=6)
    assert sorted(even.choose_task(ticket) for ticket in range(6)) == list(range(6))
    few = curriculum(tmp_path / "few", weigh=lambda known: [0, 1, 0, 1, 0, 0], batch_size=6)
    (tmp_path / "few").mkdir()
    assert {few.choose_task(ticket) for ticket in range(12)} == {1, 3}


@given(order=st.permutations(range(9)), repeats=st.lists(st.integers(0, 8), max_size=5))
def test_what_is_known_depends_on_no_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], repeats: list[int]
) -> None:
    seen: list[dict[str, Any]] = []

    def weigh(known: dict[str, Any]) -> Any:
        seen.append(known)
        return [1, 1, 1, 0, 0, 0]

    tasks = curriculum(tmp_path_factory.mktemp("any"), weigh)
    drawn = [tasks.choose_task(ticket) for ticket in range(9)]
    assert np.isnan(seen[0]["reward"]).all()
    for ticket in (*order, *repeats):
        tasks.record_rewards(ticket, [ticket / 8, 0.0])
    tasks.record_rewards(100, [1.0])  # of another curriculum, or none
    tasks.choose_task(9)
    newest = [max(t for t in range(9) if drawn[t] == task) for task in range(3)]
    np.testing.assert_allclose(seen[-1]["reward"][:3], [ticket / 16 for ticket in newest])
    assert np.isnan(seen[-1]["reward"][3:]).all()
    assert seen[-1]["groups"].tolist() == [3, 3, 3, 0, 0, 0]
    assert seen[-1]["ticket"] == 9


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1.0] * 5, r"shape \(5,\), expected 6"),
        ([0.0] * 6, "0.0 to 0.0"),
        ([1.0] * 5 + [float("nan")], "nan"),
        ([1.0] * 5 + [-1.0], "-1.0 to 1.0"),
        ("heavy", "could not convert"),
        (None, "shape"),
    ],
)
def test_weights_that_cannot_be_used_are_said_and_not_asked_for_again(
    tmp_path: Path, weights: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    tickets: list[int] = []

    def weigh(known: dict[str, Any]) -> Any:
        tickets.append(known["ticket"])
        return evenly(known) if known["ticket"] == 0 else weights

    tasks = curriculum(tmp_path, weigh)
    kept = tasks.choose_task(1)
    for _ in range(2):
        with pytest.raises(AgentError, match=rf"rollout\.curriculum: .*{says}"):
            tasks.choose_task(3)
    assert says.strip("\\").split(",")[0].replace("\\", "") in tasks.trouble
    assert tickets == [0, 3]
    assert tasks.choose_task(1) == kept
    assert "Traceback" in caplog.text, "the log says where in the user's code"
