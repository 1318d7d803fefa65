"""Recipes decide which episodes make a ticket's group, and which groups are trained."""

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.wire.ledger import TicketRef
from tests.integration.rollout.test_driver import Cell, Fails, tickets
from tests.integration.rollout.test_episode import ask

HERE = "tests.integration.rollout.test_groups"


def rewards_differ_and_task_is_even(group: dict[str, Any]) -> bool:
    """Filter in the form of AReaL's."""
    return bool(0 < group["rewards"].mean() < 1 and group["task"]["task"] % 2 == 0)


def one_of_them(group: dict[str, Any]) -> Any:
    return group["rewards"].mean() > 0.3  # a numpy bool


def neither(group: dict[str, Any]) -> Any:
    return "yes"


def broken(group: dict[str, Any]) -> bool:
    raise KeyError("advantages")


class Numbered:
    """Reward of a task's n-th episode; tasks of four episodes have 0, 1, 0, 1 if uneven."""

    def __init__(self, same_for: set[int]) -> None:
        self.same_for = same_for
        self.seen: Counter[int] = Counter()

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        self.seen[data["task"]] += 1
        return 1.0 if data["task"] in self.same_for else float(self.seen[data["task"]] % 2)


EVEN = f"{HERE}:rewards_differ_and_task_is_even"


@pytest.mark.parametrize(
    ("same_for", "rollout", "filtered"),
    [
        ({1, 3}, {"filter_same_reward": True}, dict.fromkeys([1, 3], "all 4 rewards are 1")),
        (
            {0},
            {"should_accept": EVEN},
            {0: rf"{EVEN} .* \[1.0, 1.0, 1.0, 1.0\]", 1: f"{EVEN} .*", 3: f"{EVEN} .*"},
        ),
        ({0, 1}, {"should_accept": f"{HERE}:one_of_them"}, {}),
    ],
    ids=["all equal", "the user's, of rewards and task", "none by default, a numpy bool accepts"],
)
def test_groups_are_filtered_as_the_recipe_says(
    tmp_path: Path, same_for: set[int], rollout: dict[str, Any], filtered: dict[int, str]
) -> None:
    cell = Cell(tmp_path, Numbered(same_for), tickets(4), **rollout)
    cell.run()
    reasons = {ref.ticket_id: reason for ref, reason in cell.ledger.filtered.items()}
    assert reasons.keys() == filtered.keys()
    assert all(re.fullmatch(text, reasons[number]) for number, text in filtered.items()), reasons
    assert {ref.ticket_id for ref in cell.proxy.discarded} == filtered.keys()
    assert {ref.ticket_id for ref in cell.ledger.finished} == {*range(4)} - filtered.keys()
    assert cell.ledger.dropped == {}
    assert len(cell.events("group_filtered")) == len(filtered)


@pytest.mark.parametrize(
    ("function", "message"), [("neither", "expected a bool"), ("broken", "KeyError: 'advantages'")]
)
def test_a_failing_filter_drops_tickets(tmp_path: Path, function: str, message: str) -> None:
    cell = Cell(tmp_path, Numbered(set()), tickets(1), should_accept=f"{HERE}:{function}")
    cell.run()
    assert message in cell.ledger.dropped[TicketRef(0, 0)]


class Staggered:
    """Agent whose first episodes end at once, and whose others never end."""

    def __init__(self, quick: int) -> None:
        self.left = quick
        self.cancelled = 0

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        self.left -= 1
        if self.left < 0:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return float(self.left)


def test_the_first_episodes_to_end_make_the_group_and_the_others_are_cut(tmp_path: Path) -> None:
    agent = Staggered(quick=4)
    cell = Cell(tmp_path, agent, tickets(1, n_samples=6), extra_samples=2)
    cell.run()
    (sessions,) = cell.proxy.finished.values()
    assert len(sessions) == 4
    assert agent.cancelled == 2
    assert [event["count"] for event in cell.events("episodes_cancelled")] == [2]


def fails_at(*places: int) -> Fails:
    return Fails(lambda _, begun: begun in places)


def test_a_partial_group_is_trained_if_the_recipe_allows(tmp_path: Path) -> None:
    cell = Cell(tmp_path, fails_at(1), tickets(1), min_samples=3, max_episode_tries=1)
    cell.run()
    (sessions,) = cell.proxy.finished.values()
    assert [cell.proxy.sessions[session_id].started.episode for session_id in sessions] == [0, 2, 3]
    (missing,) = cell.events("group_incomplete")
    assert missing["count"] == 1
    assert "no luck with task 0 at 1" in missing["reason"]


@pytest.mark.parametrize("rollout", [{}, {"min_samples": 3}])
def test_a_group_with_too_few_episodes_is_dropped(tmp_path: Path, rollout: dict[str, int]) -> None:
    cell = Cell(tmp_path, fails_at(0, 1), tickets(1), max_episode_tries=1, **rollout)
    cell.run()
    assert "no luck with" in cell.ledger.dropped[TicketRef(0, 0)]
    assert cell.proxy.finished == {}
    assert cell.proxy.discarded == [TicketRef(0, 0)], "cut episodes left open sessions behind"


def sealed(cell: Cell) -> dict[int, list[float]]:
    """Return the proxy's rewards of each episode of the first ticket's group."""
    sessions = [cell.proxy.sessions[name] for name in cell.proxy.finished[TicketRef(0, 0)]]
    return {session.started.episode: list(session.rewards.values()) for session in sessions}


def test_a_failed_episode_is_trained_with_the_reward_that_the_recipe_gives_it(
    tmp_path: Path,
) -> None:
    cell = Cell(tmp_path, fails_at(1, 2), tickets(1), failed_episodes={"reward": -0.5})
    cell.run()
    assert sealed(cell) == {0: [1.0], 1: [-0.5], 2: [-0.5], 3: [1.0]}
    assert len(cell.sessions) == 4, "none is repeated"
    failures = cell.events("episode_failed")
    assert [(failure["episode"], failure["reward"], failure["then"]) for failure in failures] == [
        (1, -0.5, "it earns -0.5"),
        (2, -0.5, "it earns -0.5"),
    ]
    assert cell.proxy.failed == [], "a row is sealed as trained or as failed, not as both"


class NeedsLuck:
    """Agent that fails before any call of the model, `times` in all."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        self.left -= 1
        if self.left >= 0:
            raise ConnectionError("no luck")
        await ask(extra_kwargs)
        return 1.0


def test_an_episode_that_said_nothing_is_repeated_for_it_has_nothing_to_train(
    tmp_path: Path,
) -> None:
    cell = Cell(tmp_path, NeedsLuck(2), tickets(1), failed_episodes={"reward": 0})
    cell.run()
    assert sealed(cell) == {episode: [1.0] for episode in range(4)}
    assert len(cell.sessions) == 6


@pytest.mark.parametrize(("least", "kept"), [(3, [0, 2, 3]), (None, None)])
def test_a_failed_episode_is_left_out_without_another_try(
    tmp_path: Path, least: int | None, kept: list[int] | None
) -> None:
    cell = Cell(tmp_path, fails_at(1), tickets(1), failed_episodes="drop", min_samples=least)
    cell.run()
    assert [failure["then"] for failure in cell.events("episode_failed")] == ["it is left out"]
    if kept is None:
        assert "failed once; last error" in cell.ledger.dropped[TicketRef(0, 0)]
    else:
        assert [*sealed(cell)] == kept
