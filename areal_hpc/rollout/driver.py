"""Driver of a cell: it leases tickets from the ledger and runs them until the run is over."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from functools import partial

from areal_hpc.errors import (
    AgentError,
    ArealError,
    HttpStatusError,
    NodeResourceShortageError,
    RecipeError,
    escape_surrogates,
)
from areal_hpc.rollout.concurrency import AdaptiveSlots
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.episodes.group import GroupPlayer, build_ticket_facts
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropTicketRequest,
    Empty,
    EvaluationResultRequest,
    LeaseReply,
    LeaseRequest,
    TaskSplit,
    TicketGrant,
    TicketRef,
)
from areal_hpc.wire.proxy import FinishTicketReply, FinishTicketRequest, SealTicketsReply

log = logging.getLogger(__name__)

IDLE_LEASE_LONG_POLL_S = 2.0
"""Time for which the ledger may hold the lease request of an idle driver."""
IDLE_LEASE_PAUSE_S = 0.05
LEASE_REQUEST_TIMEOUT_S = 5.0
SEAL_TIMEOUT_S = 300.0
ENGINE_LOAD_PERIOD_S = 1.0
FAILED_SEAL_PAUSE_S = 2.0


class LeasedTickets:
    """Tickets leased by a driver, and its free episode slots.

    A cell has at least as many slots as a training ticket has episodes, else it could start none.
    """

    def __init__(self, episode_slots: int, episodes_per_ticket: int) -> None:
        self.slots = max(episode_slots, episodes_per_ticket)
        self._episodes_per_ticket = episodes_per_ticket
        self.changed = asyncio.Event()
        """Event that is set when a ticket ends, or slots for a further one are free."""
        self._open_episodes: dict[TicketRef, int] = {}
        self._begun_episodes: dict[TicketRef, int] = {}
        self._finished: dict[TicketRef, None] = {}  # in the order of their ends

    @property
    def open_episodes(self) -> int:
        return sum(self._open_episodes.values())

    def set_slots(self, slots: int) -> None:
        """Change the number of slots; if it is less than the open episodes, these go on."""
        self.slots = max(slots, self._episodes_per_ticket)
        self._announce_free_slots()

    @property
    def free_episode_slots(self) -> int:
        return max(0, self.slots - self.open_episodes)

    @property
    def ended_episodes_of_open_tickets(self) -> int:
        """Number of ended episodes of training tickets that have not ended."""
        return sum(
            begun - self._open_episodes[ref]
            for ref, begun in self._begun_episodes.items()
            if ref.eval_step < 0
        )

    @property
    def held(self) -> list[TicketRef]:
        return list(self._open_episodes)

    @property
    def finished(self) -> list[TicketRef]:
        """Training tickets that have ended and are not known to be settled.

        The driver reports them until the ledger settles them, because a restarted ledger has no
        record of them.
        """
        return list(self._finished)

    def hold(self, grant: TicketGrant) -> bool:
        """Hold a granted ticket, and return False if it is held already (a repeated grant)."""
        if grant.ref in self._open_episodes or grant.ref in self._finished:
            return False
        self.begin_episodes(grant)
        return True

    def begin_episodes(self, grant: TicketGrant) -> None:
        self._open_episodes[grant.ref] = self._begun_episodes[grant.ref] = grant.n_episodes

    def end_episode(self, ref: TicketRef) -> None:
        self._open_episodes[ref] -= 1
        self._announce_free_slots()

    def _announce_free_slots(self) -> None:
        if self.free_episode_slots >= self._episodes_per_ticket:
            self.changed.set()

    def release(self, ref: TicketRef, *, is_finished: bool) -> None:
        """Release a ticket; a finished one is reported until the ledger has settled it."""
        del self._open_episodes[ref], self._begun_episodes[ref]
        if is_finished:
            self._finished[ref] = None
        self.changed.set()

    def forget_finished(self, refs: Iterable[TicketRef]) -> None:
        for ref in refs:
            self._finished.pop(ref, None)


class Driver:
    """Driver that keeps a cell's episode slots busy until the ledger replies with `stop`.

    It sends one lease request at a time, so that `held` and `finished` in it are current. A busy
    driver sends short requests and waits between them for the end of a ticket; the ledger holds
    the request of an idle one. A driver leases nothing while no replica of the cell serves.
    """

    def __init__(
        self,
        cell: str,
        player: GroupPlayer,
        *,
        episode_slots: int,
        episodes_per_ticket: int,
        ledger: AsyncServiceClient,
        proxy: AsyncServiceClient,
        events: EventLog,
        splits: tuple[TaskSplit, ...] = ("train", "valid"),
        job_start: int = 0,
        adaptive_slots: AdaptiveSlots | None = None,
    ) -> None:
        self._cell, self._player, self._adaptive_slots = cell, player, adaptive_slots
        self._splits, self._job_start = splits, job_start
        self._ledger, self._proxy, self._events = ledger, proxy, events
        slots = episode_slots if adaptive_slots is None else adaptive_slots.count
        self.tickets = LeasedTickets(slots, episodes_per_ticket)
        self._seal: asyncio.Task[None] | None = None

    # Leases ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Lease tickets and run them until the ledger stops it; cancelling cancels all episodes."""
        async with asyncio.TaskGroup() as group:
            watch_tasks = [
                group.create_task(self._player.gate.run(self.tickets.changed.set)),
                group.create_task(self._player.watch.run()),
            ]
            if self._adaptive_slots is not None:
                following = self._follow_engine_load(self._adaptive_slots)
                watch_tasks.append(group.create_task(following))
            ticket_tasks = set[asyncio.Task[None]]()
            while not (reply := await self._request_lease()).stop:
                self.tickets.forget_finished(reply.over)
                for grant in reply.grants:
                    if self.tickets.hold(grant):
                        ticket_tasks.add(task := group.create_task(self._run_ticket(grant)))
                        task.add_done_callback(ticket_tasks.discard)
                self._record_activity()
                if reply.seal_now and not self._is_sealing:
                    self._seal = group.create_task(self._request_seal())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        reply.pause_s if self._is_busy else IDLE_LEASE_PAUSE_S
                    ):
                        await self.tickets.changed.wait()
                self._record_activity()
            for task in (*watch_tasks, *ticket_tasks, *([self._seal] if self._seal else [])):
                task.cancel()

    async def _follow_engine_load(self, adaptive_slots: AdaptiveSlots) -> None:
        while True:
            self.tickets.set_slots(await adaptive_slots.look(self.tickets.open_episodes))
            await asyncio.sleep(ENGINE_LOAD_PERIOD_S)

    def is_idle_without_ledger(self, for_s: float) -> bool:
        return not self.tickets.open_episodes and self._ledger.silent_s >= for_s

    def _record_activity(self) -> None:
        if self.tickets.open_episodes:
            record_state_entry("episodes")
        else:
            record_state_entry("idle" if self._player.gate.is_open else "no replica")

    @property
    def _is_sealing(self) -> bool:
        return self._seal is not None and not self._seal.done()

    @property
    def _is_busy(self) -> bool:
        return bool(self.tickets.held) or self._is_sealing or not self._player.gate.is_open

    async def _request_lease(self) -> LeaseReply:
        self.tickets.changed.clear()
        request = LeaseRequest(
            cell=self._cell,
            capacity=self.tickets.free_episode_slots if self._player.gate.is_open else 0,
            held=self.tickets.held,
            finished=self.tickets.finished,
            wait_s=0.0 if self._is_busy else IDLE_LEASE_LONG_POLL_S,
            job_start=self._job_start,
            splits=self._splits,
            ended_episodes=self.tickets.ended_episodes_of_open_tickets,
            slowest_episode_s=self._player.watch.oldest_running_age_s,
            slots=self.tickets.slots,
        )
        return await self._ledger.call_repeatedly(
            "/lease", request, LeaseReply, timeout_s=LEASE_REQUEST_TIMEOUT_S + request.wait_s
        )

    async def _request_seal(self) -> None:
        finished = self.tickets.finished
        try:
            await self._proxy.call_repeatedly(
                "/rl/seal", Empty(), SealTicketsReply, timeout_s=SEAL_TIMEOUT_S
            )
            # They are settled; or lost with the proxy's journal, and the ledger issues them again.
            self.tickets.forget_finished(finished)
        except HttpStatusError as refusal:
            log.error("the proxy could not seal a shard: %s", refusal)
            await asyncio.sleep(FAILED_SEAL_PAUSE_S)  # the next lease reply requests a seal again
        self.tickets.changed.set()

    # Tickets ---------------------------------------------------------------------------------

    async def _run_ticket(self, grant: TicketGrant) -> None:
        """Run a ticket until it is finished, evaluated, filtered or dropped."""
        is_finished = False
        try:
            if grant.ref.eval_step >= 0:
                await self._run_evaluation_ticket(grant)
            else:
                is_finished = await self._run_training_ticket(grant)
        except (AgentError, RecipeError, NodeResourceShortageError) as error:
            await self._drop_ticket(grant, error)
        self.tickets.release(grant.ref, is_finished=is_finished)

    async def _play_group(self, grant: TicketGrant) -> list[EpisodeOutcome]:
        self.tickets.begin_episodes(grant)
        return await self._player.play(grant, partial(self.tickets.end_episode, grant.ref))

    async def _run_evaluation_ticket(self, grant: TicketGrant) -> None:
        """Run all samples of a held-out task; samples that failed for good earn 0."""
        outcomes = await self._play_group(grant)
        try:
            await self._finish_sessions(grant.ref, [outcome.session_id for outcome in outcomes])
        except HttpStatusError as refusal:  # the proxy restarted and lost them
            log.warning("the episodes of %s are not kept: %s", grant.ref, refusal)
        n_failed = grant.n_episodes - len(outcomes)
        rewards = [outcome.reward for outcome in outcomes] + [0.0] * n_failed
        answers = [outcome.answer for outcome in outcomes] + [""] * n_failed
        result = EvaluationResultRequest(
            self._cell, grant.ref, rewards, answers if any(answers) else []
        )
        await self._report_to_ledger("/report_evaluation", result)

    async def _run_training_ticket(self, grant: TicketGrant) -> bool:
        """Run a training ticket, and have the proxy journal its sessions.

        Return False if the filter rejected its group: then the proxy and the ledger forget it.
        """
        while True:
            incarnation = self._proxy.peer_started_at
            outcomes = await self._play_group(grant)
            rewards = [outcome.reward for outcome in outcomes]
            rejection = self._player.find_rejection(grant, rewards)
            kept_session_ids = [] if rejection else [outcome.session_id for outcome in outcomes]
            try:
                await self._finish_sessions(grant.ref, kept_session_ids)
            except HttpStatusError as refusal:
                if self._proxy.peer_started_at == incarnation:
                    raise AgentError(f"the proxy refused the ticket: {refusal}") from refusal
                log.warning("the proxy restarted and lost %s; its episodes run again", grant.ref)
                continue
            if rejection:
                self._record("group_filtered", grant, rejection)
                drop = DropTicketRequest(self._cell, grant.ref, rejection, "filtered", rewards)
                await self._report_to_ledger("/drop", drop)
            return not rejection

    async def _drop_ticket(self, grant: TicketGrant, error: ArealError) -> None:
        trace, cause = "", str(error)
        if isinstance(error, AgentError):
            trace, cause = error.trace, error.cause
        elif isinstance(error, NodeResourceShortageError):
            cause = ""  # no fault of the agent
        reason = escape_surrogates("\n".join(filter(None, (str(error), trace))))
        self._record("ticket_dropped", grant, reason)
        log.error("dropped %s: %s", grant.ref, reason)
        drop = DropTicketRequest(self._cell, grant.ref, reason, cause=cause)
        await self._report_to_ledger("/drop", drop)
        try:  # threads of a cancelled agent may still send requests in its sessions
            await self._finish_sessions(grant.ref, [])
        except HttpStatusError as refusal:
            log.warning("could not discard the sessions of %s: %s", grant.ref, refusal)

    async def _finish_sessions(self, ref: TicketRef, kept_session_ids: list[str]) -> None:
        """Have the proxy keep these sessions of a ticket for its shards, and close the others."""
        request = FinishTicketRequest(ref, kept_session_ids, discard=not kept_session_ids)
        await self._proxy.call_repeatedly("/rl/finish_ticket", request, FinishTicketReply)

    async def _report_to_ledger(
        self, route: str, request: DropTicketRequest | EvaluationResultRequest
    ) -> None:
        try:
            await self._ledger.call_repeatedly(route, request, Acknowledged)
        except HttpStatusError as refusal:  # the ledger has issued the ticket to another cell
            log.warning("the ledger no longer accepts a report on %s: %s", request.ref, refusal)

    def _record(self, event: str, grant: TicketGrant, reason: str) -> None:
        self._events.record(event, **build_ticket_facts(grant), reason=reason)
