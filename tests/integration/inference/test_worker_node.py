"""Both ends of a replica that spans two nodes, with small programs in the place of SGLang."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from areal_hpc.inference.multi_node import WorkerNode
from areal_hpc.inference.server.command import NodeOptions, ServerCommand, ServerPorts
from areal_hpc.rundir import rendezvous
from tests.integration.inference.small_servers import (
    KEY,
    call,
    control_proxy,
    make_replica,
    server,
    server_command,
)
from tests.support.deadlines import scaled
from tests.support.process_commands import command_of
from tests.support.waiting import wait_for

PATIENCE_S = scaled(1.0)
PART = "import sys, time; time.sleep(600)"


class Pair:
    """The first node's replica and control proxy, and the second node, in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[tuple[int, NodeOptions]] = []
        self.head = make_replica(folder, server(), nodes=2)
        self._stack = ExitStack()
        self.proxy = self._stack.enter_context(control_proxy(self.head, folder))
        rendezvous.publish_endpoint(folder, "control-cell-0", self.proxy.url)
        self.worker = WorkerNode(
            1,
            2,
            launch=self._launch,
            cell="cell-0",
            rendezvous_dir=folder,
            service_key=KEY,
            log_dir=folder,
            head_timeout_s=PATIENCE_S,
        )

    def _launch(self, incarnation: int, ports: ServerPorts, part: NodeOptions) -> ServerCommand:
        self.parts.append((incarnation, part))
        return server_command(PART, ports)

    def tick_until(self, condition: Callable[[], bool]) -> None:
        def tick() -> bool:
            self.head.maintain_server_once()
            self.worker.sync_with_head_node()
            return condition()

        wait_for(tick, why=lambda: (self.head.build_view(), self.parts))

    def is_ready(self, incarnation: int) -> bool:
        view = self.head.build_view()
        return (view.incarnation, view.state) == (incarnation, "ready")

    def running(self) -> list[psutil.Process]:
        """Parts that run on the second node."""
        children = psutil.Process().children(recursive=True)
        return [one for one in children if command_of(one)[2:] and PART in command_of(one)[2]]

    def close(self) -> None:
        self.worker.stop_part_for_good()
        self.head.request_stop()
        self.head.kill()
        self._stack.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_both_nodes_run_the_same_incarnation_until_either_loses_its_part(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    ((incarnation, part),) = pair.parts
    assert (incarnation, part.node, part.nodes) == (1, 1, 2)
    assert part.meeting_point.startswith("127.0.0.1:")
    assert (pair.folder / "replica-0.1-node-1.log").exists()
    pair.running()[0].kill()
    pair.tick_until(lambda: pair.is_ready(2) and len(pair.running()) == 1)
    assert len(pair.parts) == 2
    assert "lost its process on node 1" in (pair.folder / "events.jsonl").read_text()
    (old,) = pair.running()
    psutil.Process(pair.head._server.pid).kill()  # type: ignore[union-attr]
    pair.tick_until(
        lambda: pair.is_ready(3) and len(pair.running()) == 1 and old not in pair.running()
    )
    assert [incarnation for incarnation, _ in pair.parts] == [1, 2, 3]
    (new,) = pair.running()
    assert new != old


def test_a_part_does_not_outlive_a_first_node_that_is_gone(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    pair.proxy.stop()

    def is_over() -> bool:
        pair.worker.sync_with_head_node()
        return not pair.running()

    wait_for(is_over)


def test_a_part_does_not_outlive_a_first_node_that_says_nothing(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        rendezvous.publish_endpoint(pair.folder, "control-cell-0", url)

        def is_over() -> bool:
            pair.worker.sync_with_head_node()
            return not pair.running()

        wait_for(is_over)


def test_a_node_that_the_cell_does_not_have_is_refused(pair: Pair) -> None:
    for node in (0, 2, -1):
        answer = call(pair.proxy, "follow", {"node": node, "incarnation": 0})
        assert answer.status_code == 400
        assert f"expected a node from 1 to 1, got {node}" in answer.text
