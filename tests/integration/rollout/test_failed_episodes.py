"""Failed episodes that earn something, before the real proxy: what becomes of their rows."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import SamplingDefaults, StartSessionRequest
from areal_hpc.wire.trajectory import RowKind
from tests.integration.rollout.standins import driving
from tests.integration.rollout.test_episode import Ends, ask
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import CELL


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    stage.speak_in_letters()
    yield stage
    stage.close()


class Lingers:
    """Takes too long after its only call."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        await asyncio.sleep(1000.0)
        return 1.0


async def play(stage: Stage, ref: TicketRef, agents: list[Agent]) -> list[EpisodeOutcome]:
    """The episodes of a ticket, whose failures earn -0.5."""
    paths, outcomes = stage.paths, []
    async with driving(paths.rendezvous_dir, stage.service_key, f"proxy-{CELL}") as (peer, client):
        for number, agent in enumerate(agents):
            session = StartSessionRequest(
                f"train-{number}", ref, number, SamplingDefaults(), rights="calls"
            )
            timeout_s = scaled(3.0 if isinstance(agent, Lingers) else 60.0)
            spec = EpisodeSpec(session, {}, timeout_s, failure_reward=-0.5)
            outcomes.append(await run_episode(spec, agent, peer, client))
    return outcomes


def test_a_failed_episode_is_sealed_among_those_that_are_trained(stage: Stage) -> None:
    ref = TicketRef(3, 0)
    agents: list[Agent] = [Ends(1.0), Ends(ValueError("no luck"), calls=2), Lingers()]
    outcomes = asyncio.run(play(stage, ref, agents))
    assert [one.status for one in outcomes] == ["ok", "failed", "timed_out"]
    assert [one.has_failure_reward for one in outcomes] == [False, True, True]
    assert [one.reward for one in outcomes] == [1.0, -0.5, -0.5]
    stage.finish_ticket(ref, *(one.session_id for one in outcomes))
    assert stage.seal() == 1
    rows = stage.sealed_rows(ref)
    assert {row.kind for row in rows} == {RowKind.TRAIN}
    rewards = {row.episode: row.reward for row in rows}
    assert rewards == {0: 1.0, 1: -0.5, 2: -0.5}
    assert all(row.loss_mask_T.any() for row in rows)
