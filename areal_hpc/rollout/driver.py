"""Driver of a cell: leases tickets from the ledger and has them run, until the run is over."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from areal_hpc.errors import HttpStatusError
from areal_hpc.rollout.episode_watch import EpisodeWatch
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.ledger import Empty, LeaseReply, LeaseRequest, TaskSplit, TicketGrant, TicketRef
from areal_hpc.wire.proxy import ProxyHealth, SealTicketsReply

log = logging.getLogger(__name__)

IDLE_LEASE_LONG_POLL_S = 2.0
"""How long the ledger may keep the request of a driver that has nothing to do."""
IDLE_LEASE_PAUSE_S = 0.05
LEASE_REQUEST_TIMEOUT_S = 5.0
SEAL_TIMEOUT_S = 300.0
FAILED_SEAL_PAUSE_S = 2.0
CLOSED_GATE_POLL_S = 0.25
"""Between two questions to the proxy while no replica serves. An open gate asks nothing."""


@dataclass(frozen=True, slots=True)
class ServiceClients:
    """The services that a driver calls."""

    ledger: AsyncServiceClient
    proxy: AsyncServiceClient

    async def close(self) -> None:
        await self.ledger.close()
        await self.proxy.close()


class LeasedTickets:
    """Tickets leased by a driver, and its free capacity.

    A cell with fewer slots than a training ticket has episodes could never start one, and gets as
    many.
    """

    def __init__(self, episode_slots: int, episodes_per_ticket: int) -> None:
        self._slots = max(episode_slots, episodes_per_ticket)
        self._episodes_per_ticket = episodes_per_ticket
        self.changed = asyncio.Event()
        """Set when a ticket ends, or there is room for a further one."""
        self._open_episodes: dict[TicketRef, int] = {}
        self._begun_episodes: dict[TicketRef, int] = {}
        self._finished: dict[TicketRef, None] = {}  # in order

    @property
    def free_episode_slots(self) -> int:
        return max(0, self._slots - sum(self._open_episodes.values()))

    @property
    def has_no_open_episodes(self) -> bool:
        return not any(self._open_episodes.values())

    @property
    def ended_episodes_of_open_tickets(self) -> int:
        """Episodes that are over, of training tickets that are not."""
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
        """Training tickets that ended and, as far as is known here, are not settled.

        Reported until the ledger says otherwise: one that restarted knows nothing of them.
        """
        return list(self._finished)

    def hold_granted(self, ticket_grant: TicketGrant) -> bool:
        """Hold a granted ticket. False if it is here already (the grant was repeated)."""
        if ticket_grant.ref in self._open_episodes or ticket_grant.ref in self._finished:
            return False
        self.mark_all_episodes_begun(ticket_grant)
        return True

    def mark_all_episodes_begun(self, ticket_grant: TicketGrant) -> None:
        ref, count = ticket_grant.ref, ticket_grant.n_episodes
        self._open_episodes[ref] = self._begun_episodes[ref] = count

    def mark_episode_ended(self, ref: TicketRef) -> None:
        self._open_episodes[ref] -= 1
        if self.free_episode_slots >= self._episodes_per_ticket:
            self.changed.set()

    def mark_finished(self, ref: TicketRef) -> None:
        self.stop_holding(ref)
        self._finished[ref] = None

    def forget_finished(self, refs: Iterable[TicketRef]) -> None:
        for ref in refs:
            self._finished.pop(ref, None)

    def stop_holding(self, ref: TicketRef) -> None:
        del self._open_episodes[ref], self._begun_episodes[ref]
        self.changed.set()


class ReplicaGate:
    """Holds a cell's episodes back while none of its replicas serves.

    Closed until the proxy says that one does, and again when an episode found none. `on_open` is
    called each time it opens.
    """

    def __init__(self, proxy: AsyncServiceClient, on_open: Callable[[], None]) -> None:
        self._proxy, self._on_open = proxy, on_open
        self._opened, self._closed = asyncio.Event(), asyncio.Event()
        self._closed.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close_until_replica_serves(self) -> None:
        self._opened.clear()
        self._closed.set()

    async def wait_until_open(self) -> None:
        await self._opened.wait()

    async def run(self) -> None:
        """Ask the proxy whenever the gate is closed, until cancelled."""
        while True:
            await self._closed.wait()
            health = await self._proxy.call_until_answered("/healthz", None, ProxyHealth)
            if health.replicas_serving:
                self._closed.clear()
                self._opened.set()
                self._on_open()
            else:
                await asyncio.sleep(CLOSED_GATE_POLL_S)


class Driver:
    """Keeps the episode slots of one cell busy until the ledger says stop.

    One lease request is under way at a time, so that the ledger can take `held` and `finished`
    for the truth. A driver with work under way asks briefly and waits here, where it hears
    at once of a ticket that ended; an idle one lets the ledger keep its request.

    Nothing is leased while no replica of the cell serves. `run_ticket` shares `tickets`, `gate` and
    `episode_watch`.
    """

    def __init__(
        self,
        cell: str,
        splits: tuple[TaskSplit, ...],
        *,
        run_ticket: Callable[[TicketGrant], Coroutine[Any, Any, None]],
        tickets: LeasedTickets,
        services: ServiceClients,
        gate: ReplicaGate,
        episode_watch: EpisodeWatch,
        job_start: int = 0,
    ) -> None:
        self._cell, self._splits, self._job_start = cell, splits, job_start
        self._run_ticket, self._tickets = run_ticket, tickets
        self._ledger, self._proxy = services.ledger, services.proxy
        self._gate, self._watch = gate, episode_watch
        self._seal: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Lease tickets and start them until told to stop. Cancelling it cancels every episode."""
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(one.run()) for one in (self._gate, self._watch)]
            under_way = set[asyncio.Task[None]]()
            while not (reply := await self._send_heartbeat_and_request_lease()).stop:
                self._tickets.forget_finished(reply.over)
                for grant in reply.grants:
                    if self._tickets.hold_granted(grant):
                        under_way.add(task := group.create_task(self._run_ticket(grant)))
                        task.add_done_callback(under_way.discard)
                self._record_activity_state()
                if reply.seal_now and not self._is_seal_request_under_way:
                    self._seal = group.create_task(self._request_seal())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        reply.pause_s if self._needs_short_lease_request else IDLE_LEASE_PAUSE_S
                    ):
                        await self._tickets.changed.wait()
                self._record_activity_state()
            for task in (*watching, *under_way, *([self._seal] if self._seal else [])):
                task.cancel()

    def is_idle_without_ledger(self, for_s: float) -> bool:
        return self._tickets.has_no_open_episodes and self._ledger.silent_s >= for_s

    def _record_activity_state(self) -> None:
        if not self._tickets.has_no_open_episodes:
            record_state_entry("episodes")
        else:
            record_state_entry("idle" if self._gate.is_open else "no replica")

    @property
    def _is_seal_request_under_way(self) -> bool:
        return self._seal is not None and not self._seal.done()

    @property
    def _needs_short_lease_request(self) -> bool:
        return bool(self._tickets.held) or self._is_seal_request_under_way or not self._gate.is_open

    async def _send_heartbeat_and_request_lease(self) -> LeaseReply:
        self._tickets.changed.clear()
        request = LeaseRequest(
            cell=self._cell,
            capacity=self._tickets.free_episode_slots if self._gate.is_open else 0,
            held=self._tickets.held,
            finished=self._tickets.finished,
            wait_s=0.0 if self._needs_short_lease_request else IDLE_LEASE_LONG_POLL_S,
            job_start=self._job_start,
            splits=self._splits,
            ended_episodes=self._tickets.ended_episodes_of_open_tickets,
            slowest_episode_s=self._watch.oldest_running_age_s,
        )
        return await self._ledger.call_until_answered(
            "/lease", request, LeaseReply, timeout_s=LEASE_REQUEST_TIMEOUT_S + request.wait_s
        )

    async def _request_seal(self) -> None:
        finished = self._tickets.finished
        try:
            await self._proxy.call_until_answered(
                "/rl/seal", Empty(), SealTicketsReply, timeout_s=SEAL_TIMEOUT_S
            )
            # Settled, or lost with the proxy's journal: then the ledger must issue them again.
            self._tickets.forget_finished(finished)
        except HttpStatusError as refusal:
            log.error("the proxy could not seal a shard: %s", refusal)
            await asyncio.sleep(FAILED_SEAL_PAUSE_S)  # the ledger will ask again at once
        self._tickets.changed.set()
