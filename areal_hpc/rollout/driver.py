"""The driver of a cell: leases tickets, keeps its episode slots busy, reports how they ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.errors import AgentError, ArealError, RecipeError, encodable
from areal_hpc.rollout.acceptance import Acceptance
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.config import RolloutConfig, SamplingConfig
from areal_hpc.rollout.episode import EpisodeOutcome, EpisodeSpec, episode_seed, run_episode
from areal_hpc.rollout.group import first_error, run_group
from areal_hpc.rollout.limits import limits_of
from areal_hpc.rollout.peer import Peer
from areal_hpc.rollout.tasks import TaskSet
from areal_hpc.rollout.tickets import TicketBoard
from areal_hpc.rollout.visit import await_visit
from areal_hpc.rollout.workflow import RolloutWorkflow
from areal_hpc.rundir.events import EventLog
from areal_hpc.wire.http import HttpRefused
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropRequest,
    Empty,
    EvaluatedRequest,
    LeaseReply,
    LeaseRequest,
    Split,
    TicketGrant,
    TicketRef,
)
from areal_hpc.wire.proxy import (
    FinishTicketReply,
    FinishTicketRequest,
    SamplingDefaults,
    SealReply,
    SessionLimits,
)

log = logging.getLogger(__name__)

IDLE_WAIT_S = 2.0
"""How long the ledger may keep the request of a driver that has nothing to do."""
FAILED_SEAL_PAUSE_S = 2.0
FIRST_RETRY_PAUSE_S = 0.25
LONGEST_RETRY_PAUSE_S = 10.0
"""An agent that fails because of an outage must not use up its tries in a moment."""
LEAST_PAUSE_S = 0.05
LEASE_TIMEOUT_S = 5.0
SEAL_TIMEOUT_S = 300.0
BLOCKED_S = 2.0
"""An event loop that stood still for longer is reported: heartbeats depend on it."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom a driver talks to."""

    ledger: Peer
    proxy: Peer


class Driver:
    """Runs the episodes of one cell until the ledger says stop.

    One lease request is under way at a time, so that the ledger can take `held` and `finished`
    for the truth. A driver with work under way asks briefly and waits here, where it hears
    at once of a ticket that ended; an idle one lets the ledger keep its request.
    """

    def __init__(
        self,
        cell: str,
        rollout: RolloutConfig,
        evaluation_sampling: SamplingConfig,
        episode_slots: int,
        *,
        agent: Agent | None,
        evaluation_agent: Agent | None = None,
        tasks: Mapping[Split, TaskSet],
        splits: tuple[Split, ...] = ("train", "valid"),
        peers: Peers,
        http_client: Any,
        events: EventLog,
        job_start: int = 0,
    ) -> None:
        """Prepare to take tickets of `splits`.

        Raises:
            RecipeError: The filter of groups cannot be imported.
        """
        self._cell, self._job_start = cell, job_start
        self._rollout = rollout
        self._sampling: dict[Split, SamplingDefaults] = {
            "train": SamplingDefaults(**rollout.sampling.model_dump()),
            "valid": SamplingDefaults(**evaluation_sampling.model_dump()),
        }
        self._agents: dict[Split, Agent | None] = {
            "train": agent,
            "valid": evaluation_agent or agent,
        }
        # The clients of a workflow have passed rewards back already.
        self._export = {
            split: rollout.agent.export_settings(isinstance(one, RolloutWorkflow))
            for split, one in self._agents.items()
        }
        self._acceptance = Acceptance(rollout)
        self._tasks, self._splits = tasks, splits
        self._ledger = peers.ledger
        self._proxy = peers.proxy
        self._http_client = http_client
        self._events = events
        # A cell with fewer slots than a group has episodes could never start one.
        self._board = TicketBoard(max(episode_slots, rollout.episodes_per_ticket))
        self._news = asyncio.Event()
        self._seal: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Lease, run and report until told to stop. Cancelling it cancels every episode.

        Raises:
            HttpRefused: The ledger refuses this driver.
        """
        async with asyncio.TaskGroup() as group:
            while not (reply := await self._lease()).stop:
                self._board.forget(reply.over)
                for grant in reply.grants:
                    if self._board.accept(grant):
                        self._start(group, self._run_ticket(grant))
                if reply.seal_now and not self._sealing:
                    self._seal = self._start(group, self._seal_now())
                await self._pause(reply.pause_s if self._busy else LEAST_PAUSE_S)
            for task in self._under_way:
                task.cancel()

    @property
    def is_at_rest(self) -> bool:
        """True while no episode is under way."""
        return self._board.is_at_rest

    @property
    def _sealing(self) -> bool:
        return self._seal is not None and not self._seal.done()

    @property
    def _busy(self) -> bool:
        return bool(self._board.held) or self._sealing

    def _start(
        self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task = group.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _lease(self) -> LeaseReply:
        self._news.clear()
        request = LeaseRequest(
            cell=self._cell,
            capacity=self._board.capacity,
            held=self._board.held,
            finished=self._board.finished,
            wait_s=0.0 if self._busy else IDLE_WAIT_S,
            job_start=self._job_start,
            splits=self._splits,
        )
        return await self._ledger.call(
            "/lease", request, LeaseReply, timeout_s=LEASE_TIMEOUT_S + request.wait_s
        )

    async def _pause(self, pause_s: float) -> None:
        """Wait for news from a ticket, or until the next heartbeat is due."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(pause_s):
                await self._news.wait()
        except TimeoutError:
            late_s = clock() - began - pause_s
            if late_s > BLOCKED_S:
                self._events.record("event_loop_blocked", seconds=round(late_s, 2))
                log.warning(
                    "an agent blocked the event loop for %.1f s; use `await asyncio.to_thread(...)`"
                    " for work that does not await",
                    late_s,
                )

    async def _seal_now(self) -> None:
        """Let the proxy seal what is finished: the trainer waits for it."""
        finished = self._board.finished
        try:
            await self._proxy.call("/rl/seal", Empty(), SealReply, timeout_s=SEAL_TIMEOUT_S)
            # Settled, or lost with the proxy's journal: then the ledger must issue them again.
            self._board.forget(finished)
        except HttpRefused as refusal:
            log.error("the proxy could not seal: %s", refusal)
            await asyncio.sleep(FAILED_SEAL_PAUSE_S)  # the ledger will ask again at once
        self._news.set()

    async def _run_ticket(self, grant: TicketGrant) -> None:
        """Run a ticket until it is finished, evaluated, filtered or dropped."""
        try:
            if grant.ref.eval_step >= 0:
                await self._evaluate(grant)
                self._board.release(grant.ref)
            elif await self._generate(grant):
                self._board.finish(grant.ref)
            else:
                self._board.release(grant.ref)
        except* (AgentError, RecipeError) as group:
            await self._drop(grant, group)
            self._board.release(grant.ref)
        self._news.set()

    async def _generate(self, grant: TicketGrant) -> bool:
        """Run a training ticket and have the proxy take it into its journal.

        Returns:
            False if its group was not accepted: then the proxy and the ledger forget it.
        """
        while True:
            incarnation = self._proxy.incarnation
            outcomes = await self._run_group(grant, "train")
            task, rewards = self._tasks["train"][grant.task_index], [one.reward for one in outcomes]
            refusal_reason = self._acceptance.refusal(task, rewards)
            sessions = [] if refusal_reason else [one.session_id for one in outcomes]
            request = FinishTicketRequest(grant.ref, sessions, discard=bool(refusal_reason))
            try:
                await self._proxy.call("/rl/finish_ticket", request, FinishTicketReply)
            except HttpRefused as refusal:
                if self._proxy.incarnation == incarnation:
                    raise AgentError(f"the proxy refused the ticket: {refusal}") from refusal
                log.warning("the proxy restarted and lost sessions of %s: repeated", grant.ref)
                continue
            if refusal_reason:
                self._record("ticket_filtered", grant, refusal_reason)
                drop = DropRequest(self._cell, grant.ref, refusal_reason, "filtered", rewards)
                await self._report("/drop", drop)
            return not refusal_reason

    async def _evaluate(self, grant: TicketGrant) -> None:
        """Run an evaluation ticket and report its rewards."""
        outcomes = await self._run_group(grant, "valid")
        request = EvaluatedRequest(self._cell, grant.ref, [one.reward for one in outcomes])
        await self._report("/evaluated", request)

    async def _run_group(self, grant: TicketGrant, split: Split) -> list[EpisodeOutcome]:
        """Run the ticket's episodes side by side, each until it ends well.

        Raises:
            AgentError: Too many failed for good, the others were cancelled.
            RecipeError: There is no such task.
        """
        self._board.begin(grant)
        wanted = least = grant.n_samples
        if split == "train":
            wanted -= self._rollout.extra_samples
            least = min(wanted, self._rollout.least_samples)
        episodes = [self._run_until_ok(grant, split, episode) for episode in range(grant.n_samples)]
        group = await run_group(episodes, wanted, least)
        if group.cut:
            self._record("episodes_cut", grant, "enough others ended well", count=group.cut)
        if group.failed:
            self._record("episodes_missing", grant, str(group.failed[-1]), count=len(group.failed))
        return group.outcomes

    async def _run_until_ok(self, grant: TicketGrant, split: Split, episode: int) -> EpisodeOutcome:
        """Repeat one episode until it ends well.

        Raises:
            AgentError: It failed `max_episode_tries` times; says how it failed last.
        """
        failures = outages = 0
        while True:
            spec = self._spec(grant, split, episode, failures)
            if (agent := self._agents[split]) is None:
                outcome = await await_visit(spec, self._proxy)
            else:
                outcome = await run_episode(spec, agent, self._proxy, self._http_client)
            if outcome.status == "ok":
                self._free_slot(grant)
                return outcome
            self._record(f"episode_{outcome.status}", grant, outcome.reason, episode=episode)
            failures += outcome.status in ("failed", "timed_out")
            outages += outcome.status == "unserved"
            doublings = min(failures + outages, 16)
            await asyncio.sleep(min(FIRST_RETRY_PAUSE_S * 2**doublings, LONGEST_RETRY_PAUSE_S))
            if failures == self._rollout.max_episode_tries:
                self._free_slot(grant)
                raise AgentError(
                    f"episode {episode} of task {grant.task_index} failed {failures} times; "
                    f"at last: {outcome.reason}"
                )

    def _free_slot(self, grant: TicketGrant) -> None:
        """An episode is over: its slot may be what a further ticket waits for."""
        self._board.end_episode(grant.ref)
        if self._board.capacity >= self._rollout.episodes_per_ticket:
            self._news.set()

    def _spec(self, grant: TicketGrant, split: Split, episode: int, failures: int) -> EpisodeSpec:
        ref, task = grant.ref, self._tasks[split][grant.task_index]
        limits = limits_of(self._rollout, task)
        return EpisodeSpec(
            task_id=f"{split}-{ref.ticket_id}-{ref.attempt}-{episode}",
            data=task,
            ref=ref if split == "train" else None,
            episode=episode,
            sampling=self._sampling[split],
            seed=episode_seed(grant.seed, episode, failures),
            timeout_s=limits.timeout_s,
            export=self._export[split],
            limits=SessionLimits(limits.max_turns, limits.max_tokens),
        )

    async def _drop(self, grant: TicketGrant, group: BaseExceptionGroup[ArealError]) -> None:
        reason = encodable(str(first_error(group)))
        self._record("ticket_dropped", grant, reason)
        log.error("dropped %s: %s", grant.ref, reason)
        await self._report("/drop", DropRequest(self._cell, grant.ref, reason))
        if grant.ref.eval_step < 0:
            await self._discard(grant.ref)

    async def _discard(self, ref: TicketRef) -> None:
        """Close a dropped ticket's sessions: threads of a cancelled agent may still ask in them."""
        request = FinishTicketRequest(ref, [], discard=True)
        try:
            await self._proxy.call("/rl/finish_ticket", request, FinishTicketReply)
        except HttpRefused as refusal:
            log.warning("the proxy keeps the sessions of %s: %s", ref, refusal)

    async def _report(self, route: str, request: DropRequest | EvaluatedRequest) -> None:
        try:
            await self._ledger.call(route, request, Acknowledged)
        except HttpRefused as refusal:  # it was re-issued elsewhere meanwhile
            log.warning("the ledger does not want %s: %s", request.ref, refusal)

    def _record(self, event: str, grant: TicketGrant, reason: str, **facts: Any) -> None:
        from_ref = {key: getattr(grant.ref, key) for key in grant.ref.__struct_fields__}
        self._events.record(event, **from_ref, task=grant.task_index, **facts, reason=reason)
