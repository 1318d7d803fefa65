"""Replica that spans nodes: state on its head node, and the process of each worker node.

The head node decides. Worker nodes poll its control proxy for the incarnation to run, and start and
stop their parts. If a running part of an incarnation ends on any node, the whole incarnation is
lost. A worker node stores nothing: its part ends when the head node restarts or stays silent.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.errors import ClusterError
from areal_hpc.inference.config import InferenceJobConfig, build_server_command, get_server_log_dir
from areal_hpc.inference.server.command import NodeOptions, ServerCommand, ServerPorts
from areal_hpc.inference.server.sglang_server import STOP_GRACE_S, SGLangServer, choose_server_ports
from areal_hpc.jobs.node import get_advertised_host, get_task_position
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.replicas import FollowerPollReply, FollowerPollRequest

log = logging.getLogger(__name__)

NODE_TIMEOUT_S = 15.0
"""Time without a poll after which a node that runs a part is lost."""
POLL_S = 0.5
CALL_TIMEOUT_S = 2.0
"""Timeout of a poll. Its sum with `POLL_S` must stay below `MAX_GAP_S` of the clock: a longer wait
would count as a pause of this node, and a head node that hangs would never count as silent."""
BuildPartCommand = Callable[[int, ServerPorts, NodeOptions], ServerCommand]
"""Builder of a part's command from (incarnation, ports, part)."""


class NodePartTracker:
    """Tracker of the parts that run on the nodes of a replica; `nodes` includes the head node."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._wanted = FollowerPollReply(0, "")
        self._heard_at_s: dict[int, float] = {}
        """Time of each node's last report of its part of the current incarnation."""
        self._loss = ""

    def request_node_parts(self, incarnation: int, meeting_point: str) -> None:
        with self._lock:
            self._wanted, self._loss = FollowerPollReply(incarnation, meeting_point), ""
            self._heard_at_s.clear()

    def withdraw_node_parts(self) -> None:
        self.request_node_parts(0, "")

    def answer_node_poll(self, request: FollowerPollRequest, now_s: float) -> FollowerPollReply:
        """Record a node's poll; return the incarnation that it must run.

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
        """Find the reason why the current incarnation is lost; empty while it is not."""
        with self._lock:
            for node, heard_at_s in self._heard_at_s.items():
                if now_s - heard_at_s > NODE_TIMEOUT_S:
                    silence = f"node {node} has been silent for {NODE_TIMEOUT_S:.0f} s"
                    self._loss = self._loss or silence
            return self._loss


def run(config: dict[str, Any]) -> None:
    """Follow the cell's head node until a stop is requested."""
    job = InferenceJobConfig.model_validate(config)
    paths = RunPaths(job.run_dir)
    stop = StopRequest.install()
    worker = WorkerNode(
        get_task_position().rank,
        job.recipe.inference.nodes_per_replica,
        launch=partial(build_server_command, job, 0),
        cell=job.cell,
        rendezvous_dir=paths.rendezvous_dir,
        service_key=rendezvous.read_service_key(paths.service_key),
        log_dir=get_server_log_dir(job, paths),
    )
    record_state_entry("serve")
    try:
        while not stop.requested:
            worker.sync_with_head_node()
            stop.wait(POLL_S)
    finally:
        worker.stop_part_for_good()


class WorkerNode:
    """Worker node: it runs this node's part of one incarnation after the other.

    `node` is its index among the `nodes` of the cell, from 1. The head node is lost if it is silent
    for longer than `head_timeout_s`.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        *,
        launch: BuildPartCommand,
        cell: str,
        rendezvous_dir: Path,
        service_key: str,
        log_dir: Path,
        head_timeout_s: float = NODE_TIMEOUT_S,
    ) -> None:
        self._node = node
        self._nodes = nodes
        self._launch = launch
        self._client = ServiceClient(
            rendezvous_dir,
            rendezvous.format_control_proxy_name(cell),
            service_key,
            timeout_s=CALL_TIMEOUT_S,
        )
        self._log_dir = log_dir
        self._head_timeout_s = head_timeout_s
        self._clock = AwakeClock()
        self._server: SGLangServer | None = None
        self._incarnation = 0
        self._answered_at_s = self._clock.now()

    def sync_with_head_node(self) -> None:
        """Poll the head node once; start or stop this node's part as it requires."""
        if self._server is not None and (death := self._server.find_death_reason()):
            log.error("SGLang on this worker node (replica start %d) %s", self._incarnation, death)
            self._stop_server_part()
        try:
            request = FollowerPollRequest(self._node, self._incarnation)
            reply = self._client.call("/follow", request, FollowerPollReply)
        except ClusterError as error:
            silent_s = self._clock.now() - self._answered_at_s
            if self._server is not None and silent_s > self._head_timeout_s:
                log.error("stopped: the head node is unreachable: %s", error)
                self._stop_server_part()
            return
        self._answered_at_s = self._clock.now()
        if reply.incarnation != self._incarnation:
            self._stop_server_part()
            if reply.incarnation:
                self._start_server_part(reply)

    def _start_server_part(self, reply: FollowerPollReply) -> None:
        ports = choose_server_ports()
        part = NodeOptions(self._node, self._nodes, reply.meeting_point, get_advertised_host())
        log_path = self._log_dir / f"replica-0.{reply.incarnation}-node-{self._node}.log"
        self._server = SGLangServer(
            self._launch(reply.incarnation, ports, part),
            ports,
            log_path,
            started_at=self._clock.now(),
        )
        self._incarnation = reply.incarnation
        log.info("restart %d: starting this node's part", reply.incarnation)

    def _stop_server_part(self) -> None:
        if self._server is not None:
            self._server.request_stop()
            self._server.kill(STOP_GRACE_S)
        self._server, self._incarnation = None, 0

    def stop_part_for_good(self) -> None:
        self._stop_server_part()
        self._client.close()
