"""The journal rebuilds all that happened before a crash, compacted or not."""

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.store import (
    InteractionAdded,
    RewardSet,
    SessionDropped,
    SessionEnded,
    SessionFailed,
    SessionOpened,
    SessionStore,
    TicketDropped,
    TicketFinished,
    TicketsAcknowledged,
    TicketsSealed,
    UntrainedSealed,
    compute_key_digest,
    generate_key,
)
from areal_hpc.session.tree import InteractionTree
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import NO_VERSION, SealedTicket, TicketRef
from areal_hpc.wire.proxy import StartSessionRequest
from tests.unit.session.model_stub import say, user

SYNC_INTERVAL_S = 60.0
draws = st.integers(0, 1000)


def picture(store: SessionStore) -> dict[str, Any]:
    """Return all records of a store as plain data."""
    return {
        "sessions": {
            session_id: (
                *(session.opened, session.ended, session.failure, list(session.tree)),
                session.recorded_bytes,
            )
            for session_id, session in store.sessions.items()
            if session.must_persist
        },
        "finished": {
            ref: (
                [session.session_id for session in ticket.sessions],
                ticket.row_count,
                ticket.row_bytes,
                ticket.finished_at,
            )
            for ref, ticket in store.finished.items()
        },
        "apart": list(store.apart),
        "sealed": dict(store.sealed),
        "dropped": dict(store.dropped),
    }


class RecorderMachine(RuleBasedStateMachine):
    """Machine that drives a recorder as drivers and the sealer do, with crashes and compactions."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.recorder = JournaledRecorder(self.folder / "journal", sync_interval_s=SYNC_INTERVAL_S)
        self.count = 0

    def teardown(self) -> None:
        self.recorder.close()
        shutil.rmtree(self.folder)

    @property
    def store(self) -> SessionStore:
        return self.recorder.store

    def pick(self, draw: int, *, ended: bool) -> Any:
        """Pick a session of an unfinished ticket, or None."""
        sessions = [
            session
            for session in self.store.sessions.values()
            if session.ended is ended and session.request.ref not in self.store.finished
            if not session.failure
        ]
        return sessions[draw % len(sessions)] if sessions else None

    @rule(draw=draws)
    def open(self, draw: int) -> None:
        self.count += 1
        ticket = TicketRef(draw % 4, self.count // 8)
        ref = (None, TicketRef(0, 0, 3), ticket, ticket, ticket)[draw % 5]
        if ref is not None and self.store.count_rows_of_ticket(ref) is not None:
            return
        request = StartSessionRequest("task", ref, draw % 3)
        opened = SessionOpened(f"s{self.count}", compute_key_digest(generate_key()), request)
        self.recorder.record(opened)

    @rule(draw=draws, text=st.sampled_from(["a", "b", "é"]))
    def answer(self, draw: int, text: str) -> None:
        if session := self.pick(draw, ended=False):
            trial = InteractionTree()
            for interaction in session.tree:
                trial.add(interaction)
            answered = say(trial, [user(text)], text)
            added = InteractionAdded(session.session_id, answered)
            self.recorder.record(added)

    @rule(draw=draws)
    def reward(self, draw: int) -> None:
        session = self.pick(draw, ended=False)
        if session and len(session.tree):
            last = session.tree.last_completed.interaction_id
            plain, whole = Reward(draw), Reward(draw, parts={"half": draw / 2}, note="é")
            self.recorder.record(RewardSet(session.session_id, last, (plain, whole)[draw % 2]))

    @rule(draw=draws)
    def end(self, draw: int) -> None:
        if session := self.pick(draw, ended=False):
            self.recorder.record(SessionEnded(session.session_id))

    @rule(draw=draws)
    def drop(self, draw: int) -> None:
        if session := self.pick(draw, ended=bool(draw % 2)):
            self.recorder.record(SessionDropped(session.session_id))

    @rule(draw=draws)
    def finish(self, draw: int) -> None:
        session = self.pick(draw, ended=True)
        if not session or not any(interaction.reward for interaction in session.tree):
            return
        if session.must_persist and (ref := session.request.ref):
            self.recorder.record(TicketFinished(ref, [session.session_id], time.time()))

    @rule(draw=draws)
    def fail(self, draw: int) -> None:
        session = self.pick(draw, ended=True)
        if session and session.request.ref:
            failed = SessionFailed(session.session_id, "KeyError at a.py:1", "why", time.time())
            self.recorder.record(failed)

    @rule(draw=draws)
    def seal_untrained(self, draw: int) -> None:
        refs = [entry.ref for entry in self.store.finished.values() if entry.is_evaluation]
        failed = list(self.store.apart)[: 1 + draw % 2]
        if refs or failed:
            self.recorder.record(UntrainedSealed(refs, failed))

    @rule(draw=draws)
    def seal(self, draw: int) -> None:
        refs = [entry.ref for entry in self.store.finished.values() if not entry.is_evaluation]
        refs = refs[: 1 + draw % 2]
        if not refs:
            return
        sealed = [SealedTicket(ref, "cell-0-000000.h5", [0], [1.0], NO_VERSION) for ref in refs]
        self.recorder.record(TicketsSealed(sealed))

    @precondition(lambda self: self.store.finished)
    @rule()
    def give_up(self) -> None:
        self.recorder.record(TicketDropped(next(iter(self.store.finished)), "cannot be sealed"))

    @precondition(lambda self: self.store.sealed or self.store.dropped)
    @rule(draw=draws)
    def settle(self, draw: int) -> None:
        refs = [*self.store.sealed, *self.store.dropped]
        self.recorder.record(TicketsAcknowledged(refs[: 1 + draw % 2]))

    @rule()
    def compact(self) -> None:
        asyncio.run(self.recorder.compact())

    @rule()
    def crash(self) -> None:
        before = picture(self.store)
        self.recorder.close()
        self.recorder = JournaledRecorder(self.folder / "journal", sync_interval_s=SYNC_INTERVAL_S)
        assert picture(self.store) == before

    @invariant()
    def every_key_opens_its_session(self) -> None:
        assert set(self.store._by_key) == {
            session.opened.key_digest for session in self.store.sessions.values()
        }


RecorderMachine.TestCase.settings = settings(stateful_step_count=40)
test_a_recorder_remembers_across_crashes = RecorderMachine.TestCase


def test_a_key_is_found_by_its_digest_alone() -> None:
    store, key = SessionStore(), generate_key()
    store.apply(SessionOpened("s", compute_key_digest(key), StartSessionRequest("t")))
    assert store.find_session_by_key(key) is store.sessions["s"]
    assert store.find_session_by_key(key[:-1]) is None
    assert key not in str(msgspec.to_builtins(store.sessions["s"].opened))


@pytest.mark.parametrize(
    ("ref", "ended", "dropped"),
    [(TicketRef(1, 0), True, False), (None, True, True), (None, False, False)],
)
def test_only_what_nobody_needs_is_idle(ref: TicketRef | None, ended: bool, dropped: bool) -> None:
    store = SessionStore()
    store.apply(SessionOpened("s", b"k", StartSessionRequest("t", ref, disposable=not ref)))
    session = store.sessions["s"]
    session.ended = ended
    session.touched_at -= 61.0
    assert bool(store.list_droppable_sessions(3600.0)) is dropped
    session.touched_at -= 3600.0
    assert store.list_droppable_sessions(3600.0) == [session]
    session.in_flight = 1
    assert store.list_droppable_sessions(3600.0) == []


def test_an_episode_that_ended_is_kept_while_others_of_its_ticket_are_played() -> None:
    """The other episodes may be tried again and again until a replica serves."""
    store = SessionStore()
    for name, ticket_id in (("good", 1), ("tried", 1), ("other", 2)):
        request = StartSessionRequest("t", TicketRef(ticket_id, 0))
        store.apply(SessionOpened(name, name.encode(), request))
        store.sessions[name].touched_at -= 3601.0
    good, tried, other = store.sessions.values()
    good.ended = True
    assert store.list_droppable_sessions(3600.0) == [good, tried, other]
    tried.in_flight = 1
    assert store.list_droppable_sessions(3600.0) == [other]
    tried.in_flight = 0
    tried.touch()
    assert store.list_droppable_sessions(3600.0) == [other]
