"""When a sender has vanished, and what becomes of the replica that it updated."""

import pytest

from areal_hpc.inference.update_state import WeightUpdateState


@pytest.fixture
def state() -> WeightUpdateState:
    """Of a replica that serves."""
    state = WeightUpdateState()
    state.mark_serving("1.4")
    return state


def call(state: WeightUpdateState, route: str, now: float, deadline_s: float = 10) -> None:
    """One that SGLang accepts at once."""
    state.on_call_started(route, now, deadline_s)
    state.on_call_finished(route, now, deadline_s, accepted=True)


def test_fencing_and_pausing_again_do_not_put_off_the_end(state: WeightUpdateState) -> None:
    state.mark_fenced(0, 10, stays_if_sender_lost=False)
    assert (state.served_version, state.has_sender) == ("", True)
    state.mark_fenced(5, 10, stays_if_sender_lost=False)
    call(state, "pause_generation", 6)
    assert not state.is_sender_overdue(9.9)
    assert state.is_sender_overdue(10)


def test_accepted_calls_put_off_the_end_and_serving_cancels_it(state: WeightUpdateState) -> None:
    call(state, "pause_generation", 0)
    call(state, "begin_weight_update", 1)
    call(state, "update_weights_from_distributed", 2, deadline_s=100)
    assert [state.served_version, state.is_changed] == ["", True]
    assert not state.is_sender_overdue(101)
    call(state, "update_weights_from_distributed", 3)
    call(state, "continue_generation", 4)
    assert not state.is_paused
    state.mark_serving("1.5")
    assert [state.served_version, state.has_sender] == ["1.5", False]
    assert not state.is_sender_overdue(1000)


def test_a_call_in_flight_is_waited_for_before_a_loss(state: WeightUpdateState) -> None:
    state.on_call_started("begin_weight_update", 0, 10)
    assert not state.is_sender_overdue(50)
    state.on_call_finished("begin_weight_update", 60, 10, accepted=False)
    assert state.is_sender_overdue(60)


def test_time_of_an_update_is_that_of_its_calls(state: WeightUpdateState) -> None:
    """Not that of waiting for the sender and for other replicas."""
    call(state, "pause_generation", 0)
    for step in (5, 6):
        state.mark_fenced(100 * step, 10, stays_if_sender_lost=False)
        state.on_call_started("update_weights_from_distributed", 100 * step, 10)
        state.mark_fenced(100 * step + 1, 10, stays_if_sender_lost=False)
        state.on_call_started("update_weights_from_distributed", 100 * step + 1, 10)
        for now in (100 * step + 2, 100 * step + 3):
            state.on_call_finished("update_weights_from_distributed", now, 10, accepted=True)
        state.on_call_started("generate", 100 * step + 50, 10)
        state.on_call_finished("generate", 100 * step + 50 + step, 10, accepted=True)
        state.mark_serving(f"1.{step}")
        assert state.last_busy_s == 3 + step


@pytest.mark.parametrize(("stays", "version"), [(False, "1.4"), (True, "")])
def test_a_sender_that_changed_nothing_leaves_the_replica_as_it_said(
    state: WeightUpdateState, stays: bool, version: str
) -> None:
    """One that gave the replica up keeps it out of service."""
    state.mark_fenced(0, 10, stays_if_sender_lost=False)
    call(state, "pause_generation", 1)
    state.mark_fenced(2, 10, stays_if_sender_lost=stays)
    state.drop_lost_sender()
    assert (state.served_version, state.is_paused, state.has_sender) == (version, False, False)
