"""A workflow with clients of its own: what they recorded becomes the episode's rows."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_hpc.rollout.agent import RolloutWorkflow, load_agent
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.shards.reader import ShardReader
from areal_hpc.trainer.batch.untrained import count_untrainable_tokens
from areal_hpc.wire.http import AsyncWireClient
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import (
    ExportSettings,
    FinishTicketRequest,
    RecordCallsRequest,
    SamplingDefaults,
    StartSessionRequest,
)
from tests.integration.rollout.standins import driving
from tests.support.proxy_stage import Stage

PATH = "examples.frameworks.recording_clients.TwoTries"
TASK = {"messages": [{"role": "user", "content": "hi"}], "answer": "hello"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    yield stage
    stage.close()


def play(
    stage: Stage, agent: Any, ticket_id: int, *, is_bound_to_top_p: bool = False
) -> EpisodeOutcome:
    export = ExportSettings("individual", is_credited=True)  # as a driver asks for workflows
    session = StartSessionRequest(
        "train", TicketRef(ticket_id, 0), seed=1, export=export, records_calls=True
    )
    if is_bound_to_top_p:
        session = msgspec.structs.replace(
            session,
            sampling=SamplingDefaults(top_p=0.9),
            sampling_from="recipe",
            records_sampling_mask=True,
        )
    spec = EpisodeSpec(session, dict(TASK), timeout_s=60.0)

    async def episode() -> EpisodeOutcome:
        directory, key = stage.paths.rendezvous_dir, stage.service_key
        async with driving(directory, key) as (peer, http_client):
            return await run_episode(spec, agent, peer, http_client)

    return asyncio.run(episode())


@pytest.mark.parametrize("is_bound_to_top_p", [False, True])
def test_rows_are_what_the_clients_exported(
    stage: Stage, is_bound_to_top_p: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    if is_bound_to_top_p:  # masks are large: as if each call took all that a request holds
        monkeypatch.setattr("areal_hpc.rollout.agent.MAX_RECORD_BATCH_BYTES", 1)
        call = AsyncWireClient.call

        async def call_and_count(
            self: AsyncWireClient, route: str, request: Any, *rest: Any, **more: Any
        ) -> Any:
            if isinstance(request, RecordCallsRequest):
                batches.append(len(request.interactions))
            return await call(self, route, request, *rest, **more)

        monkeypatch.setattr(AsyncWireClient, "call", call_and_count)
    agent = load_agent(PATH, {"tokenizer": str(stage.model_dir)})
    stage.sglang.requests.clear()
    stage.ledger.settled.clear()
    ticket_id = 10 + is_bound_to_top_p
    outcome = play(stage, agent, ticket_id, is_bound_to_top_p=is_bound_to_top_p)
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason
    request = FinishTicketRequest(TicketRef(ticket_id, 0), [outcome.session_id])
    assert stage.post("/rl/finish_ticket", request).json() == {"rows": 4}
    assert stage.post("/rl/seal", {}).json() == {"tickets": 1}
    (settled,) = stage.ledger.settled
    assert sorted(settled.rewards) == [pytest.approx(0.9), pytest.approx(0.9), 1.0, 1.0]
    rows = ShardReader(stage.paths.shards_dir / settled.shard).read_rows(settled.rows)
    prompts = sorted(request["input_ids"] for request in stage.sglang.requests)
    read = [row.input_ids_T[: np.argmax(row.loss_mask_T)].tolist() for row in rows]
    assert sorted(read) == prompts
    assert {row.record.calls[-1].reuse for row in rows} == {"none", "reused"}
    assert all((row.sampling_mask is not None) is is_bound_to_top_p for row in rows)
    assert not count_untrainable_tokens(rows)
    assert batches == [1] * (4 * is_bound_to_top_p)


class Mistaken(RolloutWorkflow):
    """Returns something that no client exported."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [None, {}, {"id": 1.0}, 0.5])
def test_what_no_client_exported_fails_the_episode(stage: Stage, returned: Any) -> None:
    outcome = play(stage, load_agent(Mistaken(returned), {}), 2)
    assert outcome.status == "failed"
    assert "arun_episode returned" in outcome.reason


def test_a_workflow_is_not_run_elsewhere_than_in_the_driver(stage: Stage) -> None:
    agent = SubprocessAgent(PATH, {"tokenizer": str(stage.model_dir)}, 1)
    outcome = play(stage, agent, 3)
    agent.close()
    assert "mode=inline" in outcome.reason


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input_ids": [10**6]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [5] * 2048}, "input_ids"),
        ({"stream": True}, "stream"),
    ],
)
def test_fatal_token_ids_are_refused(stage: Stage, more: dict[str, Any], param: str) -> None:
    _, key = stage.open_session()
    body = {"input_ids": [5], "rid": "r", "sampling_params": {}, **more}
    answer = stage.post("/generate", body, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
