"""Parts of a replica that spans nodes: who runs what, and when the whole is lost."""

import pytest

from areal_hpc.inference.multi_node import NODE_TIMEOUT_S, NodePartTracker
from areal_hpc.wire.replicas import FollowerPollReply, FollowerPollRequest

NOTHING = FollowerPollReply(0, "")


@pytest.fixture
def span() -> NodePartTracker:
    """Of three nodes; all of them run incarnation 4."""
    span = NodePartTracker(3)
    span.request_node_parts(4, "10.0.0.1:4000")
    for node in (1, 2):
        span.answer_node_poll(FollowerPollRequest(node, 4), 0.0)
    return span


def test_nodes_run_what_was_begun_and_nothing_after_its_end() -> None:
    span = NodePartTracker(2)
    assert span.answer_node_poll(FollowerPollRequest(1, 0), 0.0) == NOTHING
    span.request_node_parts(1, "10.0.0.1:4000")
    assert span.answer_node_poll(FollowerPollRequest(1, 0), 1.0) == FollowerPollReply(
        1, "10.0.0.1:4000"
    )
    assert span.answer_node_poll(FollowerPollRequest(1, 1), 2.0) == FollowerPollReply(
        1, "10.0.0.1:4000"
    )
    span.withdraw_node_parts()
    assert span.answer_node_poll(FollowerPollRequest(1, 1), 3.0) == NOTHING
    assert span.find_loss_reason(4.0) == ""


def test_a_part_that_ran_and_runs_no_more_loses_the_whole(span: NodePartTracker) -> None:
    assert span.find_loss_reason(0.1) == ""
    assert span.answer_node_poll(FollowerPollRequest(2, 0), 0.2) == NOTHING
    assert span.find_loss_reason(0.2) == "lost its process on node 2 of the cell"
    span.request_node_parts(5, "10.0.0.1:5000")
    assert span.find_loss_reason(0.3) == ""
    assert span.answer_node_poll(FollowerPollRequest(1, 4), 0.3) == FollowerPollReply(
        5, "10.0.0.1:5000"
    )


def test_a_silent_node_is_lost_in_bounded_time(span: NodePartTracker) -> None:
    span.answer_node_poll(FollowerPollRequest(2, 4), 10.0)
    assert span.find_loss_reason(NODE_TIMEOUT_S) == ""
    assert span.find_loss_reason(NODE_TIMEOUT_S + 0.1) == "node 1 has been silent for 15 s"


def test_a_node_that_has_not_begun_yet_is_waited_for() -> None:
    span = NodePartTracker(2)
    span.request_node_parts(1, "10.0.0.1:4000")
    span.answer_node_poll(FollowerPollRequest(1, 0), 0.0)
    assert span.find_loss_reason(10 * NODE_TIMEOUT_S) == ""
