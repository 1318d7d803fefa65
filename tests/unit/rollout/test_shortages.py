"""Patience with a node: what waits, what ends the driver, and what ends one ticket."""

import time

import pytest

from areal_hpc.errors import AgentError, ClusterError, PersistentNodeShortageError
from areal_hpc.rollout.episodes import shortages
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.episodes.shortages import ShortageTracker
from areal_hpc.wire.ledger import TicketRef

SHORT = EpisodeOutcome("interrupted", "", reason="no process left", is_node_short=True)
GOOD = EpisodeOutcome("ok", "session", reward=1.0)
A, B = (TicketRef(i, 0, 5) for i in range(2))


def test_a_node_that_lacks_something_for_all_episodes_is_given_up_and_for_one_its_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience = ShortageTracker()
    for name, outcome in (("a", SHORT), ("b", GOOD), ("c", SHORT), ("a", SHORT)):
        patience.record_try_end_and_raise_if_stuck(name, outcome)
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 0.0)
    with pytest.raises(AgentError, match=r"others, but not this one, could .* no process left"):
        patience.record_try_end_and_raise_if_stuck("a", SHORT)
    with pytest.raises(ClusterError, match=r"no episode could be played .* no process left"):
        patience.record_try_end_and_raise_if_stuck("c", SHORT)
    patience.record_try_end_and_raise_if_stuck("c", GOOD)


def test_a_node_is_not_given_up_while_an_episode_that_has_what_it_needs_runs_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 0.0)
    patience = ShortageTracker()
    with patience.follow_episode("long"):
        patience.record_episode_try_begin("long")
        patience.record_episode_try_begin("a")
        patience.record_try_end_and_raise_if_stuck("a", SHORT)
    patience.record_episode_try_begin("a")
    with patience.follow_episode("late"):
        patience.record_episode_try_begin(
            "late"
        )  # younger than tries that ended short: it may end so, too
        with pytest.raises(ClusterError, match="no episode could be played"):
            patience.record_try_end_and_raise_if_stuck("a", SHORT)


@pytest.mark.parametrize("is_another_played", [True, False])
def test_a_held_out_episode_that_is_never_played_ends_its_ticket_late_and_never_the_driver(
    is_another_played: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 0.0)
    patience = ShortageTracker()
    for _ in range(shortages.MAX_HELD_OUT_SHORTAGES - 1):
        patience.record_try_end_and_raise_if_stuck("a", SHORT, held_out_ticket=A)
        if is_another_played:
            patience.record_try_end_and_raise_if_stuck("b", GOOD)
    said = (
        "others, but not this one,"
        if is_another_played
        else "nothing else is left, and this one never"
    )
    with pytest.raises(PersistentNodeShortageError, match=f"{said} could be played"):
        patience.record_try_end_and_raise_if_stuck("a", SHORT, held_out_ticket=A)


def test_a_node_that_lacks_something_for_several_held_out_episodes_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience = ShortageTracker()
    patience.record_try_end_and_raise_if_stuck("a", SHORT, held_out_ticket=A)
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 0.0)
    with pytest.raises(ClusterError, match="no episode could be played"):
        patience.record_try_end_and_raise_if_stuck("b", SHORT, held_out_ticket=B)


def test_several_samples_of_one_held_out_task_are_no_sign_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience = ShortageTracker()
    patience.record_try_end_and_raise_if_stuck("a-1", SHORT, held_out_ticket=A)
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 0.0)
    for _ in range(shortages.MAX_HELD_OUT_SHORTAGES - 1):
        patience.record_try_end_and_raise_if_stuck("a-2", SHORT, held_out_ticket=A)
    with pytest.raises(PersistentNodeShortageError):
        patience.record_try_end_and_raise_if_stuck("a-2", SHORT, held_out_ticket=A)


def test_held_out_tasks_that_were_short_while_others_were_played_end_no_driver_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_out = {"a": A, "b": B}
    patience = ShortageTracker()
    for name, ticket in held_out.items():
        patience.record_try_end_and_raise_if_stuck(name, SHORT, held_out_ticket=ticket)
    patience.record_try_end_and_raise_if_stuck("c", GOOD)
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 0.0)
    for _ in range(shortages.MAX_HELD_OUT_SHORTAGES - 1):
        for name, ticket in held_out.items():
            patience.record_try_end_and_raise_if_stuck(name, SHORT, held_out_ticket=ticket)
    patience.record_try_end_and_raise_if_stuck("d", SHORT, held_out_ticket=TicketRef(3, 0, 5))
    for name, ticket in held_out.items():
        with pytest.raises(PersistentNodeShortageError, match="nothing else is left"):
            patience.record_try_end_and_raise_if_stuck(name, SHORT, held_out_ticket=ticket)


def test_nothing_is_left_of_an_episode_that_was_cancelled_while_it_was_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 60.0)
    clock = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    patience = ShortageTracker()
    with patience.follow_episode("a"):
        patience.record_try_end_and_raise_if_stuck("a", SHORT)
    clock = 100.0
    patience.record_try_end_and_raise_if_stuck("a", SHORT)
