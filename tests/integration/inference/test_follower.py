"""Both ends of a replica that spans two nodes, with small programs in the place of SGLang."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from areal_hpc.inference.command import NodePart, ServerCommand, ServerPorts
from areal_hpc.inference.control_proxy import ControlProxyApp, ControlProxyServer
from areal_hpc.inference.multi_node import MultiNodeReplica
from areal_hpc.inference.replica import Replica
from areal_hpc.inference.worker_node import HeadNodeClient, WorkerNode
from areal_hpc.jobs.restart_policy import RestartPolicy
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.events import EventLog
from tests.integration.inference.test_replica import server
from tests.support.process_commands import command_of

KEY = "the admin key"
PATIENCE_S = 1.0
PART = "import sys, time; time.sleep(600)"


class Pair:
    """The first node's keeper and relay, and the second node's follower, in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[tuple[int, NodePart]] = []
        self.head = Replica(
            0,
            tp=2,
            span=MultiNodeReplica(2),
            launch=server(),
            log_dir=folder / "logs",
            events=EventLog(folder / "events.jsonl", "cell-0"),
            startup_timeout_s=60,
            health_timeout_s=60,
            policy=RestartPolicy(3),
        )
        self.relay = ControlProxyServer(
            ControlProxyApp("cell-0", [self.head], KEY, folder), "127.0.0.1"
        )
        self.relay.start()
        rendezvous.publish_endpoint(folder, "control-cell-0", self.relay.url)
        chief = HeadNodeClient(folder, "cell-0", KEY)
        self.follower = WorkerNode(1, 2, self._launch, chief, folder / "logs", PATIENCE_S)

    def _launch(self, incarnation: int, part: NodePart, ports: ServerPorts) -> ServerCommand:
        self.parts.append((incarnation, part))
        return ServerCommand((sys.executable, "-c", f"{PART} # {incarnation}"))

    def tick_until(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < give_up_at, (self.head.view(), self.parts)
            self.head.tick()
            self.follower.tick()
            time.sleep(0.02)

    def is_ready(self, incarnation: int) -> bool:
        view = self.head.view()
        return (view.incarnation, view.state) == (incarnation, "ready")

    def running(self) -> list[psutil.Process]:
        """Parts that run on the second node."""
        children = psutil.Process().children(recursive=True)
        return [one for one in children if command_of(one)[2:] and PART in command_of(one)[2]]

    def close(self) -> None:
        self.follower.end()
        self.head.request_stop()
        self.head.kill()
        self.relay.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_both_nodes_run_the_same_incarnation(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    ((incarnation, part),) = pair.parts
    assert (incarnation, part.node, part.nodes) == (1, 1, 2)
    assert part.meeting_point.startswith("127.0.0.1:")
    assert (pair.folder / "logs" / "replica-0.1-node-1.log").exists()


def test_a_lost_part_costs_the_whole_incarnation(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    (lost,) = pair.running()
    lost.kill()
    pair.tick_until(lambda: pair.is_ready(2) and len(pair.parts) == 2)
    assert "lost its process on node 1" in (pair.folder / "events.jsonl").read_text()
    assert [incarnation for incarnation, _ in pair.parts] == [1, 2]
    assert len(pair.running()) == 1


def test_a_part_ends_with_the_first_nodes_server(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    (old,) = pair.running()
    psutil.Process(pair.head._server.pid).kill()  # type: ignore[union-attr]
    pair.tick_until(lambda: pair.is_ready(2) and len(pair.parts) == 2)
    assert old not in pair.running()


def test_a_part_does_not_outlive_a_first_node_that_is_gone(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    pair.relay.stop()
    give_up_at = time.monotonic() + 60
    while pair.running():
        assert time.monotonic() < give_up_at
        pair.follower.tick()
        time.sleep(0.05)


def test_a_node_that_the_cell_does_not_have_is_refused(pair: Pair) -> None:
    answer = httpx.post(
        f"{pair.relay.url}/follow",
        json={"node": 2, "incarnation": 0},
        headers={"authorization": f"Bearer {KEY}"},
        trust_env=False,
    )
    assert answer.status_code == 400
    assert "expected a node from 1 to 1, got 2" in answer.text
