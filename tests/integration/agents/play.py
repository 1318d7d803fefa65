"""Runs episodes as a driver does, in the environment of the agents' framework.

`python play.py REPORT` reads an `Order` from its standard input and writes a list of `Played` to
the file REPORT (frameworks print things). An agent's `ask` returns what it takes for the model's
last words; they are passed on, to be compared with what the proxy recorded.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.rollout.agent import Agent, load_agent
from areal_hpc.rollout.episodes.episode import EpisodeSpec, run_episode
from areal_hpc.rollout.episodes.http_client import make_http_client
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rollout.service_client import ServiceClient
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import ExportSettings, SamplingDefaults, StartSessionRequest

TIMEOUT_S = 90.0


class Episode(msgspec.Struct):
    """One agent and its task."""

    workflow: str
    data: dict[str, Any]
    kwargs: dict[str, Any] = {}
    ticket_id: int = 0
    subproc: bool = False
    max_new_tokens: int = 200
    export: ExportSettings = ExportSettings()


class Order(msgspec.Struct):
    """Episodes to run side by side."""

    run_dir: str
    cell: str
    admin_key: str
    episodes: list[Episode]


class Played(msgspec.Struct):
    """How one of them ended."""

    status: str
    reason: str
    session_id: str
    reward: float
    heard: list[str]
    """What the agent took for the model's last words."""


async def play(order: Order) -> list[Played]:
    peer = ServiceClient(
        RunPaths(Path(order.run_dir)).rendezvous_dir, f"proxy-{order.cell}", order.admin_key
    )
    http_client = make_http_client(TIMEOUT_S)
    try:
        return await asyncio.gather(*(_play_one(one, peer, http_client) for one in order.episodes))
    finally:
        await http_client.aclose()
        await peer.close()


async def _play_one(episode: Episode, peer: ServiceClient, http_client: Any) -> Played:
    heard: list[str] = []
    session = StartSessionRequest(
        episode.workflow,
        TicketRef(episode.ticket_id, 0),
        sampling=SamplingDefaults(max_new_tokens=episode.max_new_tokens),
        seed=7,
        export=episode.export,
    )
    spec = EpisodeSpec(session, episode.data, TIMEOUT_S)
    agent: Agent
    if episode.subproc:
        agent = SubprocessAgent(episode.workflow, episode.kwargs, 1)
    else:
        agent = load_agent(episode.workflow, episode.kwargs)
        _listen(agent, heard)
    try:
        outcome = await run_episode(spec, agent, peer, http_client)
    finally:
        if isinstance(agent, SubprocessAgent):
            agent.close()
    return Played(outcome.status, outcome.reason, outcome.session_id, outcome.reward, heard)


def _listen(agent: Any, heard: list[str]) -> None:
    ask = agent.ask

    async def asked(*args: Any) -> str:
        text: str = await ask(*args)
        heard.append(text)
        return text

    agent.ask = asked


if __name__ == "__main__":
    done = asyncio.run(play(msgspec.json.decode(sys.stdin.buffer.read(), type=Order)))
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(done))
