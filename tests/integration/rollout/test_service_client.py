"""A peer is followed from one incarnation to the next, even at the same address."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from areal_hpc.errors import HttpStatusError
from areal_hpc.rollout.service_client import ServiceClient
from areal_hpc.rundir import rendezvous
from areal_hpc.wire.ledger import Acknowledged, Empty


async def refuse(request: web.Request) -> web.Response:
    return web.json_response({"error": "invalid session key"}, status=401)


@pytest.mark.asyncio
async def test_a_refusal_shows_that_another_proxy_listens_where_the_last_one_did(
    tmp_path: Path,
) -> None:
    app = web.Application()
    app.router.add_post("/rl/end_session", refuse)
    server = TestServer(app)
    await server.start_server()
    url = str(server.make_url("")).rstrip("/")
    peer = ServiceClient(tmp_path, "proxy-cell-0", "key")
    incarnations = []
    for _ in range(2):
        rendezvous.publish_endpoint(tmp_path, "proxy-cell-0", url)
        with pytest.raises(HttpStatusError):
            await peer.call("/rl/end_session", Empty(), Acknowledged)
        incarnations.append(peer.instance)
    assert incarnations[0] < incarnations[1]
    await peer.close()
    await server.close()
