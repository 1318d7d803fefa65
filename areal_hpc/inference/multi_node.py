"""Multi-node replica as its head node sees it.

The others ask what to run (`worker_node.py`), and are told of one incarnation after the other. An
incarnation whose part was once running somewhere, and is not any more, is lost as a whole.
"""

import threading

from areal_hpc.inference.server.command import ServerPorts
from areal_hpc.jobs.node.topology import get_advertised_host
from areal_hpc.wire.replicas import FollowerPollReply, FollowerPollRequest

NODE_TIMEOUT_S = 15.0
"""A node that runs a part and is not heard of for so long is lost."""


class NodePartTracker:
    """Which parts run where, of a replica of so many nodes, the first one included."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._wanted = FollowerPollReply(0, "")
        self._heard_at_s: dict[int, float] = {}
        """Time at which each node last reported its part of the present incarnation."""
        self._loss = ""

    def request_node_parts(self, incarnation: int, meeting_point: str) -> None:
        with self._lock:
            self._wanted, self._loss = FollowerPollReply(incarnation, meeting_point), ""
            self._heard_at_s.clear()

    def withdraw_node_parts(self) -> None:
        self.request_node_parts(0, "")

    def answer_node_poll(self, request: FollowerPollRequest, now_s: float) -> FollowerPollReply:
        """Hear a node; what it is to run.

        Raises:
            ValueError: The cell has no such node.
        """
        if not 0 < request.node < self._nodes:
            raise ValueError(f"expected a node from 1 to {self._nodes - 1}, got {request.node}")
        with self._lock:
            if self._wanted.incarnation and request.incarnation == self._wanted.incarnation:
                self._heard_at_s[request.node] = now_s
            elif request.node in self._heard_at_s:
                self._loss = f"lost its process on node {request.node} of the cell"
            return FollowerPollReply(0, "") if self._loss else self._wanted

    def find_loss_reason(self, now_s: float) -> str:
        """Why the present incarnation cannot go on, in words; empty while it can."""
        with self._lock:
            for node, heard_at_s in self._heard_at_s.items():
                if now_s - heard_at_s > NODE_TIMEOUT_S:
                    silence = f"node {node} has been silent for {NODE_TIMEOUT_S:.0f} s"
                    self._loss = self._loss or silence
            return self._loss


def get_rendezvous_address(ports: ServerPorts) -> str:
    return f"{get_advertised_host()}:{ports.rendezvous}"
