"""The driver's process plays agents, visiting programs, and workflows with clients of their own."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from areal_hpc.errors import RecipeError
from areal_hpc.rollout.agent import RolloutWorkflow, load_agent
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.rollout.job import run
from areal_hpc.rundir.jobs import IDLE_EXIT_CODE
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.reader import ShardReader
from areal_hpc.trainer.batch.untrained import count_untrainable_tokens
from areal_hpc.wire.http import AsyncWireClient
from areal_hpc.wire.ledger import TicketGrant, TicketRef
from areal_hpc.wire.proxy import (
    ExportSettings,
    FinishTicketRequest,
    RecordCallsRequest,
    SamplingDefaults,
    StartSessionRequest,
)
from examples.quickstart.task import train_tasks
from tests.integration.rollout.standins import KEY, StandInLedger, StandInProxy, driving
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.forked_processes import ForkedProcess, fork_job_process
from tests.support.proxy_stage import Stage
from tests.support.role_recipe import write_role_recipe

ARITHMETIC = "examples.quickstart.agent.ArithmeticAgent"
BLOCKING = "tests.integration.rollout.process_agents.Blocking"
GROUP = 4


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    for folder in (paths.data_dir, paths.rendezvous_dir):
        folder.mkdir(parents=True)
    paths.service_key.touch(0o600)
    paths.service_key.write_text(KEY)
    lines = "".join(json.dumps(task) + "\n" for task in train_tasks(4, 1))
    paths.dataset("train").write_text(lines)
    return paths


def config(paths: RunPaths, workflow: str, **agent: Any) -> dict[str, Any]:
    write_role_recipe(
        paths,
        rollout={
            "workflow": workflow,
            "n_samples": 4,
            "agent": agent,
            "max_concurrent_rollouts": 8,
        },
        valid_dataset={"path": "valid.jsonl"},
    )
    return {"run_dir": str(paths.root), "cell": "cell-0", "sys_path": [str(CHECKOUT)]}


@contextmanager
def started_driver(
    paths: RunPaths, job: dict[str, Any], name: str = "driver"
) -> Iterator[ForkedProcess]:
    config_path = paths.root / f"{name}.json"
    config_path.write_text(json.dumps(job))
    log = paths.root / f"{name}.log"
    driver = fork_job_process("areal_hpc.rollout.job:run", config_path, log)
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


async def serve(ledger: StandInLedger, driver: ForkedProcess) -> None:
    is_signalled = False
    async with StandInProxy(ledger.directory), ledger:
        while driver.poll() is None:
            if not (ledger.open or ledger.stop_when_done or is_signalled):
                driver.send_signal(signal.SIGTERM)
                is_signalled = True
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("workflow", "agent", "stop_when_done"),
    [(ARITHMETIC, {}, False), (BLOCKING, {"mode": "subproc", "subproc_max_workers": 2}, True)],
    ids=["inline, then a signal", "in processes of their own, then the ledger"],
)
def test_driver_process_runs_agents_until_it_is_told_to_stop(
    paths: RunPaths, workflow: str, agent: dict[str, Any], stop_when_done: bool
) -> None:
    tickets = [TicketGrant(TicketRef(i, 0), i % 4, i, 4) for i in range(6)]
    ledger = StandInLedger(paths.rendezvous_dir, [*tickets], stop_when_done=stop_when_done)
    with started_driver(paths, config(paths, workflow, **agent)) as driver:
        asyncio.run(asyncio.wait_for(serve(ledger, driver), scaled(100)))
        assert driver.wait() == 0
    assert ledger.finished == {ticket.ref for ticket in tickets}


def test_a_driver_ends_without_a_ledger(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    job, recipe = config(paths, ARITHMETIC), yaml.safe_load(paths.recipe.read_text())
    recipe["cluster"]["idle_timeout_s"] = 1.0
    paths.recipe.write_text(yaml.safe_dump(recipe))
    with started_driver(paths, job) as waiting:  # no supervisor starts it again
        monkeypatch.setenv("AREAL_HPC_JOB_START", "1")
        with started_driver(paths, job, "under-slurm") as gone:
            assert gone.wait(scaled(60)) == IDLE_EXIT_CODE
        with pytest.raises(TimeoutError):
            waiting.wait(2.0)


def test_agent_that_cannot_be_loaded_ends_the_job_for_good(paths: RunPaths) -> None:
    for mode in ("inline", "subproc"):
        with pytest.raises(RecipeError, match="did you mean 'ArithmeticAgent'"):
            run(config(paths, ARITHMETIC.replace("tic", "tik"), mode=mode))


def visit(stage: Stage, driver: ForkedProcess, number: int) -> tuple[dict[str, Any], str]:
    """Visit as an outside program: session, task, conversation, reward. Number 0 gives none."""
    while (answer := stage.post("/rl/start_session", {"task_id": "program"})).status_code == 429:
        assert driver.poll() is None, "the ticket was finished before this program had a task"
        time.sleep(0.05)
    assert answer.status_code == 200, answer.text
    opened = answer.json()
    with stage.client(opened["api_key"]) as client:
        client.chat.completions.create(model="any", messages=opened["task"]["messages"])
    if number:
        stage.post("/rl/set_reward", {"reward": number}, opened["api_key"])
    assert stage.post("/rl/end_session", {}, opened["api_key"]).status_code == 200
    return opened["task"], opened["session_id"]


def test_what_programs_do_becomes_the_tickets_episodes(paths: RunPaths) -> None:
    task = {"messages": [{"role": "user", "content": "hi"}]}
    paths.dataset("train").write_text(json.dumps(task) + "\n")
    stage = Stage(paths.root.parent, agent={"mode": "online"})
    ref = TicketRef(0, 0)
    ledger = StandInLedger(paths.rendezvous_dir, [TicketGrant(ref, 0, 0, GROUP)])
    stage.loop.run(ledger.start())
    try:
        with started_driver(paths, config(paths, "", mode="online")) as driver:
            # The one without a reward goes first: after GROUP rewards the ticket is complete.
            visits = [visit(stage, driver, 0)]
            with ThreadPoolExecutor(GROUP) as programs:
                visits += programs.map(partial(visit, stage, driver), range(1, GROUP + 1))
            assert driver.wait(scaled(60)) == 0
        assert [visited for visited, _ in visits] == [task] * (GROUP + 1)
        assert ledger.finished == {ref}
        judged = [session_id for _, session_id in visits[1:]]
        finished = stage.post("/rl/finish_ticket", FinishTicketRequest(ref, judged))
        assert finished.json() == {"rows": GROUP}
    finally:
        stage.loop.run(ledger.kill())
        stage.close()


WORKFLOW = "examples.frameworks.recording_clients.TwoTries"
TASK = {"messages": [{"role": "user", "content": "hi"}], "answer": "hello"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("stage"))
    yield stage
    stage.close()


def play(
    stage: Stage, agent: Any, ticket_id: int, *, is_bound_to_top_p: bool = False
) -> EpisodeOutcome:
    export = ExportSettings("individual", is_credited=True)  # as drivers do for workflows
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
    agent = load_agent(WORKFLOW, {"tokenizer": str(stage.model_dir)})
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
    """Workflow that returns something that no client exported."""

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
    agent = SubprocessAgent(WORKFLOW, {"tokenizer": str(stage.model_dir)}, 1)
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
