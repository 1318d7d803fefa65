import asyncio
import errno
import json
import os
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.evaluation.set_names import TICKETS_PER_SET
from areal_hpc.recipe.sections.dataset import TaskSetConfig
from areal_hpc.recipe.sections.evaluation import (
    EvaluationConfig,
    EvaluationSamplingConfig,
    EvaluationSetConfig,
    resolve_evaluation_sets,
)
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout import driver
from areal_hpc.rollout.agent import Agent, RolloutWorkflow
from areal_hpc.rollout.concurrency import AdaptiveSlots, EngineLoad
from areal_hpc.rollout.driver import Driver
from areal_hpc.rollout.episodes import group
from areal_hpc.rollout.episodes.group import CLOSED_GATE_POLL_S, GroupPlayer
from areal_hpc.rollout.execution.agent_sandboxes import AgentSandboxes
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.run_inputs import NO_SOURCES, TaskSet, TrainSources
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.sandbox import runtimes
from areal_hpc.sandbox.guest import build_isolation_error
from areal_hpc.sandbox.runtimes import HostRuntime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec
from areal_hpc.wire.ledger import TicketGrant, TicketRef
from areal_hpc.wire.proxy import (
    ExportSettings,
    SessionLimits,
    StartSessionRequest,
)
from tests.integration.rollout.standins import StandInLedger, StandInProxy, driving
from tests.integration.rollout.test_episode import ask
from tests.support.deadlines import scaled

N_TASKS = 8
Meanwhile = Callable[[], Coroutine[Any, Any, None]]
"""Coroutine that runs beside the driver."""


def tickets(count: int, n_samples: int = 4) -> list[TicketGrant]:
    return [TicketGrant(TicketRef(i, 0), i % N_TASKS, i, n_samples) for i in range(count)]


def evaluations(count: int, step: int = 5) -> list[TicketGrant]:
    return [TicketGrant(TicketRef(i, 0, step), i % N_TASKS, i, 1) for i in range(count)]


class Cell:
    """Driver between a stand-in ledger and a stand-in proxy."""

    def __init__(
        self, run_dir: Path, agent: Agent | None, grants: list[TicketGrant], /, **rollout: Any
    ) -> None:
        self.run_dir = run_dir
        self.agent = agent
        self.evaluation_agent: Agent | None = None
        self.sandboxes: AgentSandboxes | None = None
        self.sources, self.source_agents = NO_SOURCES, list[Agent | None]()
        self.adaptive_slots: AdaptiveSlots | None = None
        self.ledger = StandInLedger(run_dir, grants)
        self.proxy = StandInProxy(run_dir)
        self.rollout = RolloutConfig(workflow="given", **{"n_samples": 4, **rollout})

    def events(self, name: str) -> list[dict[str, Any]]:
        records = read_readable_records(self.run_dir / "events.jsonl")
        return [event for event in records if event["event"] == name]

    @property
    def sessions(self) -> list[StartSessionRequest]:
        return [session.started for session in self.proxy.sessions.values()]

    def run(self, slots: int = 16, meanwhile: Meanwhile | None = None) -> None:
        asyncio.run(asyncio.wait_for(self._run(slots, meanwhile), scaled(60)))

    async def _run(self, slots: int, meanwhile: Meanwhile | None) -> None:
        tasks = TaskSet(
            Path("tasks.jsonl"), [json.dumps({"task": i}).encode() for i in range(N_TASKS)]
        )
        held_out = TaskSetConfig(path=Path("tasks.jsonl"))
        warm = EvaluationSamplingConfig(temperature=0.6)
        sets = resolve_evaluation_sets(
            EvaluationConfig(sets={"aime": EvaluationSetConfig(dataset=held_out, sampling=warm)}),
            held_out,
        )
        async with (
            self.proxy,
            self.ledger,
            driving(self.run_dir) as (proxy, http_client),
            driving(self.run_dir, name="ledger") as (ledger, _),
            asyncio.TaskGroup() as running,
        ):
            if self.sandboxes is not None:
                await self.sandboxes.fill()
            events = EventLog(self.run_dir / "events.jsonl", "driver")
            player = GroupPlayer(
                self.rollout,
                sets,
                agents={
                    "train": self.agent,
                    "valid": self.evaluation_agent or self.agent,
                    "aime": self.agent,
                },
                tasks={"train": tasks, "valid": tasks, "aime": tasks},
                proxy=proxy,
                http_client=http_client,
                events=events,
                sandboxes=self.sandboxes,
                sources=self.sources,
                source_agents=self.source_agents,
            )
            cell_driver = Driver(
                "cell-0",
                player,
                episode_slots=slots,
                episodes_per_ticket=self.rollout.episodes_per_ticket,
                ledger=ledger,
                proxy=proxy,
                events=events,
                adaptive_slots=self.adaptive_slots,
            )
            if meanwhile is not None:
                running.create_task(meanwhile())
            await cell_driver.run()
            if self.sandboxes is not None:
                await self.sandboxes.close()


class Steady:
    """Agent with one model call; the reward is the task's number, after a delay and a condition."""

    def __init__(self, seconds: float = 0.0, until: Callable[[], bool] = lambda: True) -> None:
        self.seconds = seconds
        self.until = until
        self.seeds: list[int] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        self.seeds.append(extra_kwargs["seed"])
        await ask(extra_kwargs)
        await asyncio.sleep(self.seconds)
        while not self.until():
            await asyncio.sleep(0.005)
        return float(data["task"])


class Workflow(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        raise NotImplementedError("nothing is exported here")

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        return await Steady().run(data, **extra_kwargs)


class Fails:
    """Agent that fails by the number of its task and of begun episodes; `times` in all."""

    def __init__(self, is_due: Callable[[int, int], bool], times: int = 1_000_000) -> None:
        self.is_due = is_due
        self.left = times
        self.begun = 0

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        number, self.begun = self.begun, self.begun + 1
        await ask(extra_kwargs)
        if self.left and self.is_due(data["task"], number):
            self.left -= 1
            raise RuntimeError(f"no luck with task {data['task']} at {number}")
        return 1.0


def test_every_ticket_is_finished_with_its_group_of_sessions(tmp_path: Path) -> None:
    agent = Steady()
    cell = Cell(tmp_path, agent, tickets(12))
    cell.run()
    assert set(cell.proxy.finished) == {ticket.ref for ticket in tickets(12)}
    assert cell.ledger.finished == set(cell.proxy.finished)
    for ref, sessions in cell.proxy.finished.items():
        started = [cell.proxy.sessions[name].started for name in sessions]
        assert [(start.ref, start.episode) for start in started] == [(ref, at) for at in range(4)]
        rewards = [list(cell.proxy.sessions[name].rewards.values()) for name in sessions]
        assert rewards == [[float(ref.ticket_id % N_TASKS)]] * 4
    assert len(set(agent.seeds)) == 48


def test_a_task_is_played_by_the_agent_of_its_source(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(N_TASKS))
    cell.sources = TrainSources(("easy", "hard"), (2, N_TASKS - 2))
    cell.source_agents = [cell.agent, Fails(lambda task, begun: False)]  # which earns 1
    cell.run()
    for ref, sessions in cell.proxy.finished.items():
        expected = float(ref.ticket_id) if ref.ticket_id < 2 else 1.0
        for name in sessions:
            assert list(cell.proxy.sessions[name].rewards.values()) == [expected]


@pytest.mark.parametrize(
    ("agent", "how", "limits", "export"),
    [
        (
            Steady(),
            {"export_style": "individual", "credit": "chronological", "sampling": "recipe"},
            SessionLimits(3, 50),
            ExportSettings("individual", "chronological", True, False),
        ),
        (Workflow(), {}, SessionLimits(), ExportSettings(is_credited=True)),
    ],
    ids=["agent", "workflow, whose rewards are not passed back again"],
)
def test_the_recipe_decides_the_limits_of_sessions_and_how_they_become_rows(
    tmp_path: Path, agent: Agent, how: dict[str, Any], limits: SessionLimits, export: ExportSettings
) -> None:
    configured = {"max_turns": limits.max_turns, "max_tokens": limits.max_tokens}
    cell = Cell(tmp_path, agent, tickets(1), agent=how, limits=configured)
    cell.run()
    assert [(session.limits, session.export) for session in cell.sessions] == [(limits, export)] * 4
    records = isinstance(agent, RolloutWorkflow)
    assert {session.records_calls for session in cell.sessions} == {records}
    assert {session.rights for session in cell.sessions} == {"all" if records else "calls"}
    assert {session.sampling_from for session in cell.sessions} == {how.get("sampling", "agent")}


@pytest.mark.parametrize(("slots", "open_at_once"), [(8, 8), (1, 4)])
def test_slots_are_kept_busy_and_exceeded_by_nothing_but_a_single_group(
    tmp_path: Path, slots: int, open_at_once: int
) -> None:
    cell = Cell(tmp_path, Steady(0.03), tickets(6))
    cell.run(slots)
    assert cell.proxy.most_open == open_at_once
    assert len(cell.proxy.finished) == 6


@pytest.mark.parametrize(("waiting_requests", "open_at_once"), [(0, 16), (9, 4)])
def test_slots_follow_the_load_of_the_servers(
    tmp_path: Path, waiting_requests: int, open_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_load() -> EngineLoad:
        return EngineLoad(waiting_requests, 0.5)

    monkeypatch.setattr(driver, "ENGINE_LOAD_PERIOD_S", 0.02)
    cell = Cell(tmp_path, Steady(0.2), tickets(16))
    cell.adaptive_slots = AdaptiveSlots(read_load, floor=4, ceiling=16, increase=4)
    cell.run(16)
    assert cell.proxy.most_open == open_at_once
    assert max(request.slots for request in cell.ledger.requests) == open_at_once
    assert len(cell.proxy.finished) == 16


class Loaded(HostRuntime):
    """Node on which no sandbox starts for a while, after the first one."""

    def __init__(self, failures: int, error: ClusterError | RecipeError) -> None:
        super().__init__()
        self.failures_left, self.error = failures, error
        self.has_started = False

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if self.has_started and self.failures_left:
            self.failures_left -= 1
            raise self.error
        self.has_started = True
        return await super().start(spec)


NO_PROCESS = "no processes left"


@pytest.mark.parametrize(
    "error", [ClusterError(NO_PROCESS), build_isolation_error("bwrap", "allow it", NO_PROCESS)]
)
def test_a_sandbox_that_does_not_start_costs_no_try(
    error: ClusterError | RecipeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(group, "SHORTAGE_PAUSE_S", 0.05)
    cell = Cell(tmp_path, Steady(), tickets(2), max_episode_tries=1)
    loaded = Loaded(8 * runtimes.START_TRIES, error)
    cell.sandboxes = AgentSandboxes(loaded, SandboxSpec(network="open"), 0)
    cell.run()
    assert len(cell.proxy.finished) == 2
    assert not cell.ledger.dropped
    interrupted = cell.events("episode_interrupted")
    assert interrupted
    assert all(NO_PROCESS in event["reason"] for event in interrupted)


class Oversized:
    """Agent whose task 0 needs more space than there is."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        if data["task"] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 1.0


@pytest.mark.parametrize("grants", [tickets(2, 1), evaluations(2)], ids=["train", "valid"])
def test_a_ticket_for_which_the_node_lacks_something_for_long_is_dropped(
    grants: list[TicketGrant], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "SHORTAGE_PAUSE_S", 0.05)
    monkeypatch.setattr(group, "MAX_SHORTAGE_S", 0.04)
    cell = Cell(tmp_path, Oversized(), [*grants], n_samples=1)
    cell.run()
    lost, played = (grant.ref for grant in grants)
    assert {*cell.proxy.finished, *cell.ledger.evaluated} == {played}
    assert "could not be played" in cell.ledger.dropped[lost]
    assert cell.ledger.causes == {lost: ""}, "else the ledger takes it for the agent's fault"
    assert len(cell.events("episode_interrupted")) > 1


UNLUCKY = Fails(lambda task, _: task == 0)


@pytest.mark.parametrize(
    ("agent", "grants", "timeout_s", "message"),
    [
        (UNLUCKY, tickets(4), 60.0, "task 0 failed 2 times; last error: the agent raised Runtime"),
        (UNLUCKY, evaluations(4), 60.0, "task 0 failed 2 times"),
        (Steady(5.0), tickets(1), 0.05, "took longer than 0.05 s"),
        (Steady(), [TicketGrant(TicketRef(0, 0), 99, 0, 4)], 60.0, "tasks.jsonl has 8 tasks"),
    ],
    ids=["failing agent", "failing evaluation", "slow agent", "unknown task"],
)
def test_a_ticket_that_cannot_end_well_is_dropped_with_the_reason_and_no_other_is(
    tmp_path: Path, agent: Agent, grants: list[TicketGrant], timeout_s: float, message: str
) -> None:
    cell = Cell(tmp_path, agent, [*grants], max_episode_tries=2, episode_timeout_s=timeout_s)
    cell.run()
    lost, *others = [grant.ref for grant in grants]
    assert list(cell.ledger.dropped) == [lost]
    assert message in cell.ledger.dropped[lost]
    assert {*cell.proxy.finished, *cell.ledger.evaluated} == {*others}
    assert len(cell.events("ticket_dropped")) == 1


def test_an_evaluation_has_its_own_agent_and_is_kept_apart_from_tickets(tmp_path: Path) -> None:
    playing, judging = Steady(), Steady()
    cell = Cell(tmp_path, playing, [*tickets(1), *evaluations(6)])
    cell.evaluation_agent = judging
    cell.run()
    assert (len(playing.seeds), len(judging.seeds)) == (4, 6)
    expected = {ticket.ref: [float(ticket.task_index)] for ticket in evaluations(6)}
    assert cell.ledger.evaluated == expected
    (trained,) = cell.proxy.finished.keys() - expected.keys()
    assert cell.proxy.finished.keys() == {trained, *expected}
    assert {ref for request in cell.ledger.requests for ref in request.finished} <= {trained}
    held_out = [session for session in cell.sessions if session.ref in expected]
    assert {session.sampling.temperature for session in held_out} == {0.0}
    assert sorted(session.task_index for session in held_out) == [*range(6)]
    assert not any(session.disposable for session in cell.sessions)


def test_a_driver_that_does_not_know_a_set_ends_and_names_it(tmp_path: Path) -> None:
    unknown = TicketGrant(TicketRef(7 * TICKETS_PER_SET, 0, 5), 0, 0, 1)
    with pytest.raises(ExceptionGroup) as caught:
        Cell(tmp_path, Steady(), [unknown]).run()
    expected = "is of evaluation set 7; this driver's recipe has valid, aime"
    assert caught.group_contains(ClusterError, match=expected)


@pytest.mark.parametrize("grants", [tickets(1), evaluations(2)], ids=["train", "valid"])
def test_every_failed_try_is_kept_with_its_cause_and_traceback(
    tmp_path: Path, grants: list[TicketGrant]
) -> None:
    cell = Cell(tmp_path, Fails(lambda task, _: True, times=2), [*grants], max_episode_tries=3)
    cell.run()
    assert len(cell.proxy.failed) == 2
    for number, failure in enumerate(cell.proxy.failed):
        assert re.fullmatch(rf"RuntimeError at {re.escape(__file__)}:\d+", failure.cause)
        assert f"at {number}" in failure.error.splitlines()[0]
        assert "Traceback" in failure.error
    names = {name for session_ids in cell.proxy.finished.values() for name in session_ids}
    assert names.isdisjoint(failure.session_id for failure in cell.proxy.failed)


@pytest.mark.parametrize(
    ("service", "events"), [("ledger", set()), ("proxy", {"episode_interrupted"})]
)
def test_service_restarts_cost_no_ticket(tmp_path: Path, service: str, events: set[str]) -> None:
    cell = Cell(tmp_path, Steady(0.1), tickets(24), max_episode_tries=1)
    restarted = getattr(cell, service)

    async def restart_twice() -> None:
        for _ in range(2):
            await asyncio.sleep(0.25)
            await restarted.kill()
            await asyncio.sleep(0.1)
            await restarted.start()

    cell.run(meanwhile=restart_twice)
    assert not cell.ledger.dropped
    assert len(cell.proxy.finished) == len(cell.ledger.finished) == 24
    names = {event["event"] for event in read_readable_records(tmp_path / "events.jsonl")}
    assert names - {"event_loop_blocked"} == events, "a machine may stop for seconds"


@pytest.mark.parametrize("kind", ["train", "valid"])
def test_a_time_without_any_replica_costs_no_try_and_no_ticket(tmp_path: Path, kind: str) -> None:
    """A trainer that was killed in an update may wait in a queue for hours."""
    grants = tickets(2, n_samples=2) if kind == "train" else evaluations(4)

    class Outlasts(Steady):
        """Agent that loses its replicas before its first call."""

        async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
            if not self.seeds:
                cell.proxy.has_replica = False
            return await super().run(data, **extra_kwargs)

    cell = Cell(tmp_path, Outlasts(), [*grants], n_samples=2, max_episode_tries=1)

    async def come_back() -> None:
        while len(cell.events("episode_unserved")) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * CLOSED_GATE_POLL_S)
        cell.proxy.has_replica = True

    cell.run(meanwhile=come_back)
    assert cell.ledger.dropped == {}
    assert {*cell.proxy.finished, *cell.ledger.evaluated} == {grant.ref for grant in grants}
    unserved = cell.events("episode_unserved")
    assert len(unserved) == 4, "no episode is tried again before a replica serves"
    assert "503" in unserved[0]["reason"]


def test_nothing_is_leased_or_begun_before_a_replica_serves(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(2))
    cell.proxy.has_replica = False
    begun_before: list[int] = []

    async def serve_late() -> None:
        while len(cell.ledger.requests) < 3:
            await asyncio.sleep(0.01)
        begun_before.append(cell.proxy.opened)
        cell.proxy.has_replica = True

    cell.run(meanwhile=serve_late)
    assert begun_before == [0]
    assert [request.capacity for request in cell.ledger.requests[:3]] == [0, 0, 0]
    assert len(cell.proxy.finished) == 2


def test_ledger_that_refuses_the_driver_ends_it(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(1))
    cell.ledger.refuses = True
    with pytest.raises(BaseExceptionGroup) as caught:
        cell.run()
    assert caught.group_contains(ClusterError, match="answered 403")
