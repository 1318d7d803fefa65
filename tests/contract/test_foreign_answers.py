"""A service whose port another program has by now counts as away, for every client of the run's."""

import asyncio
from collections.abc import Iterator

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.wire.http import AsyncWireClient, WireClient
from areal_hpc.wire.replicas import ReplicasOfCell
from tests.support.json_server import JsonHandler, serving_http

EXPECTED = "answered what is no ReplicasOfCell .*process_cpu_seconds"


class _Exporter(JsonHandler):
    """Metrics under whatever path, as those of Prometheus' Python library are."""

    def get(self) -> None:
        self.answer(200, b"process_cpu_seconds_total 0.1\n")


@pytest.fixture
def url() -> Iterator[str]:
    with serving_http(_Exporter) as url:
        yield url


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
