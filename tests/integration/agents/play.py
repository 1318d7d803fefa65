"""Play episodes as a driver does, in the environment of the agents' framework.

`python play.py REPORT` reads an `Order` a line from its standard input and writes a list of
`Played` for each to a file, REPORT.0 for the first (frameworks print things). What an agent's `ask`
returns is compared with what the proxy recorded.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.rollout.agent import Agent, load_agent, make_http_client
from areal_hpc.rollout.episodes.episode import run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import ExportSettings, SamplingDefaults, StartSessionRequest

TIMEOUT_S = 90.0 * float(os.environ.get("TESTS_SLOWNESS", "1"))


class Episode(msgspec.Struct):
    """Agent and its task."""

    workflow: str
    data: dict[str, Any]
    kwargs: dict[str, Any] = {}
    ticket_id: int = 0
    subproc: bool = False
    max_new_tokens: int = 200
    export: ExportSettings = ExportSettings()


class Order(msgspec.Struct):
    run_dir: str
    cell: str
    service_key: str
    episodes: list[Episode]


class Played(msgspec.Struct):
    status: str
    reason: str
    session_id: str
    reward: float
    heard: list[str]
    """Texts that the agent took for the model's last words."""


async def play_all(order: Order) -> list[Played]:
    return await asyncio.gather(*(_play_one(order, episode) for episode in order.episodes))


async def _play_one(order: Order, episode: Episode) -> Played:
    """Play one episode as a driver does."""
    replies: list[str] = []
    session = StartSessionRequest(
        episode.workflow,
        TicketRef(episode.ticket_id, 0),
        sampling=SamplingDefaults(max_new_tokens=episode.max_new_tokens),
        seed=7,
        export=episode.export,
    )
    agent: Agent
    if episode.subproc:
        agent = SubprocessAgent(episode.workflow, episode.kwargs, 1)
    else:
        agent = load_agent(episode.workflow, episode.kwargs)
        _listen(agent, replies)
    spec = EpisodeSpec(session, episode.data, TIMEOUT_S)
    paths = RunPaths(Path(order.run_dir))
    peer = AsyncServiceClient(paths.rendezvous_dir, f"proxy-{order.cell}", order.service_key)
    http_client = make_http_client(TIMEOUT_S)
    try:
        outcome = await run_episode(spec, agent, peer, http_client)
    finally:
        await http_client.aclose()
        await peer.close()
        if isinstance(agent, SubprocessAgent):
            agent.close()
    return Played(outcome.status, outcome.reason, outcome.session_id, outcome.reward, replies)


def _listen(agent: Any, replies: list[str]) -> None:
    ask = agent.ask

    async def asked(*args: Any) -> str:
        text: str = await ask(*args)
        replies.append(text)
        return text

    agent.ask = asked


def main() -> None:
    draft = Path(f"{sys.argv[1]}.draft")
    with asyncio.Runner() as runner:
        for number, line in enumerate(sys.stdin.buffer):
            order = msgspec.json.decode(line, type=Order)
            draft.write_bytes(msgspec.json.encode(runner.run(play_all(order))))
            draft.rename(f"{sys.argv[1]}.{number}")


if __name__ == "__main__":
    main()
