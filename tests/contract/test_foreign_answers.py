"""A service whose port another program has by now counts as away, for every client of the run's."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.wire.http import AsyncWireClient, WireClient
from areal_hpc.wire.replicas import ReplicasOfCell

EXPECTED = "answered what is no ReplicasOfCell .*process_cpu_seconds"


class _Exporter(BaseHTTPRequestHandler):
    """Metrics under whatever path, as those of Prometheus' Python library are."""

    def do_GET(self) -> None:
        body = b"process_cpu_seconds_total 0.1\n"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Exporter) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_that_is_no_reply_says_that_the_service_is_away(url: str) -> None:
    client = WireClient(url)
    with pytest.raises(ClusterError, match=EXPECTED):
        client.call("/replicas", None, ReplicasOfCell)
    client.close()


def test_it_does_so_in_an_event_loop(url: str) -> None:
    async def ask() -> None:
        client = AsyncWireClient(url)
        try:
            await client.call("/replicas", None, ReplicasOfCell)
        finally:
            await client.close()

    with pytest.raises(ClusterError, match=EXPECTED):
        asyncio.run(ask())
