"""Parts of a replica that spans nodes: when the whole is lost."""

from areal_hpc.inference.multi_node import NODE_TIMEOUT_S, NodePartTracker
from areal_hpc.wire.replicas import FollowerPollRequest


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
