"""Weight updates of a replica end after a bounded silence of the sender or of a node."""

import pytest

from areal_hpc.inference.multi_node import NODE_TIMEOUT_S, NodePartTracker
from areal_hpc.inference.server.sglang_server import HealthProbe
from areal_hpc.inference.update_state import WeightUpdateState
from areal_hpc.wire.awake_clock import MAX_GAP_S, AwakeClock
from areal_hpc.wire.replicas import FollowerPollRequest


@pytest.fixture
def state() -> WeightUpdateState:
    """State of a replica that serves."""
    state = WeightUpdateState()
    state.mark_serving("1.4")
    return state


def call(state: WeightUpdateState, route: str, now: float, deadline_s: float = 10) -> None:
    """Make a call that SGLang accepts at once."""
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
    """Waiting for the sender and for other replicas does not count."""
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
def test_a_sender_may_change_nothing(state: WeightUpdateState, stays: bool, version: str) -> None:
    """A sender that gave the replica up keeps it out of service."""
    state.mark_fenced(0, 10, stays_if_sender_lost=False)
    call(state, "pause_generation", 1)
    state.mark_fenced(2, 10, stays_if_sender_lost=stays)
    state.drop_lost_sender()
    assert (state.served_version, state.is_paused, state.has_sender) == (version, False, False)


def test_a_silent_node_is_lost_in_bounded_time() -> None:
    span = NodePartTracker(3)
    span.request_node_parts(4, "10.0.0.1:4000")
    for node, now_s in ((1, 0.0), (2, 0.0), (2, 10.0)):
        span.answer_node_poll(FollowerPollRequest(node, 4), now_s)
    assert span.find_loss_reason(NODE_TIMEOUT_S) == ""
    assert span.find_loss_reason(NODE_TIMEOUT_S + 0.1) == "node 1 has been silent for 15 s"


def test_a_node_that_has_not_begun_yet_is_waited_for() -> None:
    span = NodePartTracker(2)
    span.request_node_parts(1, "10.0.0.1:4000")
    span.answer_node_poll(FollowerPollRequest(1, 0), 0.0)
    assert span.find_loss_reason(10 * NODE_TIMEOUT_S) == ""


class Wall:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_short_gaps_count_and_a_pause_does_not() -> None:
    wall = Wall()
    clock = AwakeClock(wall)
    began = clock.now()
    for gap_s, awake_s in ((1.0, 1.0), (MAX_GAP_S, 1.0 + MAX_GAP_S), (70.0, 1.0 + MAX_GAP_S)):
        wall.now_s += gap_s
        assert clock.now() - began == awake_s
    assert clock.woke_at_s == clock.now()


def test_a_server_is_silent_only_while_its_cell_is_awake_and_asks_again() -> None:
    wall = Wall()
    clock = AwakeClock(wall)
    probe = HealthProbe("http://127.0.0.1:9", 30.0, clock)
    for _ in range(28):
        wall.now_s += 1.0
        assert not probe.check_silence(may_ask=True)
    wall.now_s += 70.0
    assert not probe.check_silence(may_ask=True)
    silent_s = 0
    while not probe.check_silence(may_ask=True):
        wall.now_s += 1.0
        silent_s += 1
    assert silent_s > 30
