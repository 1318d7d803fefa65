from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.recipe.sections.rollout import RolloutConfig, SamplingConfig
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.config import RolloutJobConfig
from areal_hpc.rollout.episodes.http_client import make_http_client
from areal_hpc.rollout.lease_loop import EVENT_LOOP_BLOCKED_S, LeaseLoop
from areal_hpc.rollout.leased_tickets import LeasedTickets
from areal_hpc.rollout.rollout_workflow import RolloutWorkflow
from areal_hpc.rollout.service_client import ServiceClient, Services
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rollout.ticket_runner import TicketRunner
from areal_hpc.rundir.events import EventLog
from areal_hpc.rundir.jsonl import read_lines
from areal_hpc.wire.ledger import TicketGrant, TicketRef
from areal_hpc.wire.proxy import ExportSettings, SessionLimits
from tests.integration.rollout.standins import KEY, LedgerScript, StandInLedger, StandInProxy
from tests.integration.rollout.test_episode import ask

N_TASKS = 8


def tickets(count: int, n_samples: int = 4) -> list[TicketGrant]:
    return [TicketGrant(TicketRef(i, 0), i % N_TASKS, i, n_samples) for i in range(count)]


def evaluations(count: int, step: int = 5) -> list[TicketGrant]:
    return [TicketGrant(TicketRef(i, 0, step), i % N_TASKS, i, 1) for i in range(count)]


class Cell:
    """A driver between a stand-in ledger and a stand-in proxy."""

    def __init__(
        self, run_dir: Path, agent: Agent, grants: list[TicketGrant], /, **rollout: Any
    ) -> None:
        self.run_dir = run_dir
        self.agent = agent
        self.evaluation_agent: Agent | None = None
        self.script = LedgerScript(queue=grants)
        self.ledger = StandInLedger(run_dir, self.script)
        self.proxy = StandInProxy(run_dir)
        self.rollout = RolloutConfig(workflow="given", **{"n_samples": 4, **rollout})

    @property
    def events(self) -> list[dict[str, Any]]:
        """All but those that a machine causes which stops for seconds."""
        found = read_lines(self.run_dir / "events.jsonl")
        return [event for event in found if event["event"] != "event_loop_blocked"]

    @property
    def was_blocked(self) -> bool:
        found = read_lines(self.run_dir / "events.jsonl")
        return any(event["event"] == "event_loop_blocked" for event in found)

    def run(self, slots: int = 16, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        asyncio.run(asyncio.wait_for(self._run(slots, meanwhile), 60))

    async def _run(self, slots: int, meanwhile: Callable[[], Awaitable[None]] | None) -> None:
        tasks = TaskSet(
            Path("tasks.jsonl"), [json.dumps({"task": i}).encode() for i in range(N_TASKS)]
        )
        services = Services(
            ledger=ServiceClient(self.run_dir, "ledger", KEY),
            proxy=ServiceClient(self.run_dir, "proxy-cell-0", KEY),
        )
        http_client = make_http_client(60.0)
        job = RolloutJobConfig(
            run_dir=self.run_dir,
            cell="cell-0",
            rollout=self.rollout,
            evaluation_sampling=SamplingConfig(temperature=0.0),
            episode_slots=slots,
        )
        leased = LeasedTickets(slots, self.rollout.episodes_per_ticket)
        events = EventLog(self.run_dir / "events.jsonl", "driver")
        runner = TicketRunner(
            job,
            agents={"train": self.agent, "valid": self.evaluation_agent or self.agent},
            tasks={"train": tasks, "valid": tasks},
            tickets=leased,
            services=services,
            http_client=http_client,
            events=events,
        )
        loop = LeaseLoop(job, runner=runner, tickets=leased, services=services, events=events)
        await self.proxy.start()
        await self.ledger.start()
        try:
            async with asyncio.TaskGroup() as group:
                if meanwhile is not None:
                    group.create_task(_as_coroutine(meanwhile()))
                await loop.run()
        finally:
            await http_client.aclose()
            await services.close()
            await self.ledger.kill()
            await self.proxy.kill()


async def another_request(script: LedgerScript) -> None:
    heard = len(script.requests)
    while len(script.requests) == heard:
        await asyncio.sleep(0.005)


async def _as_coroutine(work: Awaitable[None]) -> None:
    await work


class Steady:
    """One model call; the reward is the task's number."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.seeds: list[int] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        self.seeds.append(extra_kwargs["seed"])
        await ask(extra_kwargs)
        await asyncio.sleep(self.seconds)
        return float(data["task"])


class AtWorkUntil:
    """Ends as soon as something has happened."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.condition = condition

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        while not self.condition():
            await asyncio.sleep(0.005)
        return 1.0


class FailsOn:
    """Fails for one task, `times` times in all."""

    def __init__(self, task: int, times: int = 1_000_000) -> None:
        self.task = task
        self.left = times
        self.failed_tasks: Counter[int] = Counter()

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(extra_kwargs)
        if data["task"] == self.task and self.left > 0:
            self.left -= 1
            self.failed_tasks[data["task"]] += 1
            raise RuntimeError(f"cannot do task {data['task']}")
        return 1.0


def test_every_ticket_is_finished_with_its_group_of_sessions(tmp_path: Path) -> None:
    agent = Steady()
    cell = Cell(tmp_path, agent, tickets(12))
    cell.run()
    assert set(cell.proxy.finished) == {ticket.ref for ticket in tickets(12)}
    assert cell.script.finished == set(cell.proxy.finished)
    for ref, sessions in cell.proxy.finished.items():
        started = [cell.proxy.sessions[name].started for name in sessions]
        assert [one.ref for one in started] == [ref] * 4
        assert [one.episode for one in started] == [0, 1, 2, 3]
        rewards = [list(cell.proxy.sessions[name].rewards.values()) for name in sessions]
        assert rewards == [[float(ref.ticket_id % N_TASKS)]] * 4
    assert len(set(agent.seeds)) == 48


def test_the_recipe_decides_how_sessions_become_rows(tmp_path: Path) -> None:
    how = {"export_style": "individual", "turn_discount": 0.9, "credit": "chronological"}
    cell = Cell(tmp_path, Steady(), tickets(1), agent=how)
    cell.run()
    settings = {session.started.export for session in cell.proxy.sessions.values()}
    assert settings == {ExportSettings("individual", 0.9, "chronological", True)}


class Workflow(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        raise NotImplementedError("nothing is exported here")

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        return await Steady().run(data, **extra_kwargs)


def test_a_workflows_own_discount_is_not_applied_again(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Workflow(), tickets(1), agent={"turn_discount": 0.9})
    cell.run()
    assert {one.started.export.turn_discount for one in cell.proxy.sessions.values()} == {0.0}


def test_slots_are_kept_busy_and_never_exceeded(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(0.03), tickets(12))
    cell.run(slots=8)
    assert cell.proxy.most_open == 8


def test_cell_with_fewer_slots_than_a_group_still_works(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(2))
    cell.run(slots=1)
    assert len(cell.proxy.finished) == 2


def test_ticket_is_reported_as_soon_as_it_is_finished(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(10))
    cell.script.pause_s = 1000.0  # one ticket at a time: heartbeats alone would take hours
    cell.run(slots=4)
    assert len(cell.script.finished) == 10


def test_failed_episode_is_repeated_with_another_seed(tmp_path: Path) -> None:
    cell = Cell(tmp_path, FailsOn(task=1, times=2), tickets(3))
    cell.run()
    assert len(cell.proxy.finished) == 3
    assert not cell.script.dropped
    failures = [event for event in cell.events if event["event"] == "episode_failed"]
    assert len(failures) == 2
    assert all("cannot do task 1" in event["reason"] for event in failures)
    seeds = [
        session.started.seed
        for session in cell.proxy.sessions.values()
        if session.started.ref == TicketRef(1, 0)
    ]
    assert len(set(seeds)) == 6


def test_ticket_whose_agent_keeps_failing_is_dropped_with_the_reason(tmp_path: Path) -> None:
    agent = FailsOn(task=1)
    cell = Cell(tmp_path, agent, tickets(4), max_episode_tries=3)
    cell.run()
    (reason,) = cell.script.dropped.values()
    assert list(cell.script.dropped) == [TicketRef(1, 0)]
    assert "task 1 failed 3 times" in reason
    assert "RuntimeError: cannot do task 1" in reason
    assert set(cell.proxy.finished) == {TicketRef(i, 0) for i in (0, 2, 3)}
    assert [event for event in cell.events if event["event"] == "ticket_dropped"]


def test_episode_that_takes_too_long_counts_as_failed(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(5.0), tickets(1), max_episode_tries=1, episode_timeout_s=0.05)
    cell.run()
    assert "took longer than 0.05 s" in cell.script.dropped[TicketRef(0, 0)]


def test_the_limits_of_the_recipe_reach_the_session(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(1), limits={"max_turns": 3, "max_tokens": 50})
    cell.run()
    started = [session.started.limits for session in cell.proxy.sessions.values()]
    assert started == [SessionLimits(3, 50)] * 4


def test_ticket_of_an_unknown_task_is_dropped(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), [TicketGrant(TicketRef(0, 0), 99, 0, 4)])
    cell.run()
    assert "tasks.jsonl has 8 tasks" in cell.script.dropped[TicketRef(0, 0)]


def test_evaluation_is_reported_and_recorded_nowhere(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), evaluations(6))
    cell.run()
    assert cell.script.evaluated == {
        ticket.ref: [float(ticket.task_index)] for ticket in evaluations(6)
    }
    assert not cell.proxy.finished
    for session in cell.proxy.sessions.values():
        assert session.started.ref is None
        assert session.started.sampling.temperature == 0.0
    assert not any(request.finished for request in cell.script.requests)


def test_evaluation_whose_agent_keeps_failing_is_dropped(tmp_path: Path) -> None:
    cell = Cell(tmp_path, FailsOn(task=2), evaluations(4), max_episode_tries=2)
    cell.run()
    assert list(cell.script.dropped) == [TicketRef(2, 0, 5)]
    assert len(cell.script.evaluated) == 3


def test_seal_is_passed_on_while_episodes_go_on(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(0.1), tickets(6))
    cell.script.seal_now = True
    cell.proxy.script = cell.script
    cell.run()
    assert cell.proxy.seals >= 1
    assert len(cell.proxy.finished) == 6


def test_what_a_seal_left_behind_is_reported_no_more(tmp_path: Path) -> None:
    """A proxy that lost its journal can never settle it: the ledger has to issue it again."""
    cell = Cell(tmp_path, Steady(0.3), tickets(6))
    cell.proxy.script = script = cell.script
    before: set[TicketRef] = set()

    async def ask_for_a_seal() -> None:
        while not any(request.finished for request in script.requests):
            await asyncio.sleep(0.01)
        before.update(script.requests[-1].finished)
        script.seal_now = True

    cell.run(slots=8, meanwhile=ask_for_a_seal)
    assert before
    assert before.isdisjoint(script.requests[-1].finished)
    assert len(script.finished) == 6


def test_driver_survives_restarts_of_the_ledger(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(0.1), tickets(24))

    async def restart_twice() -> None:
        for _ in range(2):
            await another_request(cell.script)
            await cell.ledger.kill()
            await asyncio.sleep(0.2)
            await cell.ledger.start()

    cell.run(meanwhile=restart_twice)
    assert len(cell.proxy.finished) == 24
    assert len(cell.script.finished) == 24
    assert not cell.events


def test_restart_of_the_proxy_costs_no_try_and_no_ticket(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(0.1), tickets(24), max_episode_tries=1)

    async def restart_twice() -> None:
        for _ in range(2):
            await asyncio.sleep(0.25)
            await cell.proxy.kill()
            await asyncio.sleep(0.1)
            await cell.proxy.start()

    cell.run(meanwhile=restart_twice)
    assert not cell.script.dropped
    assert len(cell.script.finished) == 24
    assert {event["event"] for event in cell.events} == {"episode_interrupted"}


@pytest.mark.parametrize("kind", ["train", "valid"])
def test_a_time_without_any_replica_costs_no_try_and_no_ticket(tmp_path: Path, kind: str) -> None:
    """It may last for hours: a trainer that was killed in an update waits in a queue."""
    grants = tickets(1, n_samples=2) if kind == "train" else evaluations(2)
    cell = Cell(tmp_path, Steady(0.0), grants, n_samples=2, max_episode_tries=1)
    cell.proxy.has_replica = False

    async def come_back() -> None:
        sessions = cell.proxy.sessions.values()
        while cell.proxy.unserved_calls < 4 or not all(one.ended for one in sessions):
            await asyncio.sleep(0.01)
        cell.proxy.has_replica = True

    cell.run(meanwhile=come_back)
    assert cell.script.dropped == {}
    assert (len(cell.proxy.finished), len(cell.script.evaluated)) == (
        (1, 0) if kind == "train" else (0, 2)
    )
    unserved = [event for event in cell.events if event["event"] == "episode_unserved"]
    assert len(unserved) >= 4
    assert "503" in unserved[0]["reason"]


def test_another_agent_may_play_held_out_tasks(tmp_path: Path) -> None:
    playing, judging = Steady(), Steady()
    cell = Cell(tmp_path, playing, [*tickets(1), *evaluations(2)])
    cell.evaluation_agent = judging
    cell.run()
    assert (len(playing.seeds), len(judging.seeds)) == (4, 2)
    assert len(cell.script.evaluated) == 2


def test_held_and_finished_tickets_are_in_every_heartbeat(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(1))
    cell.agent = AtWorkUntil(lambda: any(request.held for request in cell.script.requests))
    cell.run()
    held = [request for request in cell.script.requests if request.held]
    assert held[0].held == [TicketRef(0, 0)]
    assert held[0].capacity == 12
    assert cell.script.requests[-1].finished == [TicketRef(0, 0)]


def test_a_busy_driver_asks_as_often_as_it_was_told_to(tmp_path: Path) -> None:
    def pauses_s(pause_s: float, count: int) -> list[float]:
        """Between the heartbeats of a cell at work, as many as it is at work for."""
        cell = Cell(tmp_path / str(pause_s), Steady(), tickets(1))
        cell.script.pause_s = pause_s
        requests = cell.script.requests
        cell.agent = AtWorkUntil(lambda: sum(bool(one.held) for one in requests) > count)
        cell.run()
        heard = zip(cell.script.heard_at_s, requests, strict=True)
        at_work_s = [at for at, request in heard if request.held][: count + 1]
        return [late - early for early, late in itertools.pairwise(at_work_s)]

    assert 0.05 <= statistics.median(pauses_s(0.05, 7)) < 0.6 <= min(pauses_s(0.6, 1))


def test_agent_that_blocks_the_loop_is_reported(tmp_path: Path) -> None:
    class Blocks:
        async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
            await ask(extra_kwargs)
            while not cell.was_blocked:  # a block that began within a call goes unseen
                time.sleep(EVENT_LOOP_BLOCKED_S + cell.script.pause_s + 0.1)
                await asyncio.sleep(0.05)
            return 1.0

    cell = Cell(tmp_path, Blocks(), tickets(1, n_samples=1), n_samples=1)
    cell.run()
    assert cell.was_blocked


def test_ledger_that_refuses_the_driver_ends_it(tmp_path: Path) -> None:
    cell = Cell(tmp_path, Steady(), tickets(1))
    cell.ledger.refuse_leases = True
    with pytest.raises(BaseExceptionGroup) as caught:
        cell.run()
    assert caught.group_contains(ClusterError, match="answered 403")
