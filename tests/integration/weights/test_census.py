"""Cells that vanish while the trainer asks for their replicas."""

import http.server
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from areal_hpc.rundir import rendezvous
from areal_hpc.weights.discovery import ReplicaDiscovery
from areal_hpc.wire.replicas import ReplicaList, ReplicaView
from tests.support.waiting import wait_for


class Relay(http.server.BaseHTTPRequestHandler):
    """Answers for one cell of one replica."""

    def do_GET(self) -> None:
        view = ReplicaView(0, 1, "ready", "http://127.0.0.1:1")
        body = msgspec.json.encode(ReplicaList("cell", [view]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def relay_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Relay) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def silent_url() -> Iterator[str]:
    """A host that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_vanished_cell_is_waited_for_once_and_heard_when_it_returns(
    tmp_path: Path, relay_url: str, silent_url: str
) -> None:
    rendezvous.publish_endpoint(tmp_path, "control-cell-0", relay_url)
    rendezvous.publish_endpoint(tmp_path, "control-cell-1", silent_url)
    census = ReplicaDiscovery(tmp_path, 2, "key")
    waits_s = []
    for _ in range(6):
        began = time.monotonic()
        assert [key.cell for key, _ in census.discover()] == ["cell-0"]
        waits_s.append(time.monotonic() - began)
    assert waits_s[0] >= 1.0
    assert statistics.median(waits_s) < 1.0, "a second goes by whenever it is waited for"
    rendezvous.publish_endpoint(tmp_path, "control-cell-1", relay_url)
    wait_for(lambda: {key.cell for key, _ in census.discover()} == {"cell-0", "cell-1"})
    census.close()
