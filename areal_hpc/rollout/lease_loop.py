"""Lease loop of a cell's driver: takes tickets from the ledger until the run is over."""

import asyncio
import contextlib
import logging
import time

from areal_hpc.errors import HttpStatusError
from areal_hpc.rollout.config import RolloutJobConfig
from areal_hpc.rollout.episode_watch import EpisodeWatch
from areal_hpc.rollout.leased_tickets import LeasedTickets
from areal_hpc.rollout.ledger_clock import LedgerClockOffsetRecorder
from areal_hpc.rollout.replica_gate import ReplicaGate
from areal_hpc.rollout.ticket_runner import ServiceClients, TicketRunner
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.ledger import Empty, LeaseReply, LeaseRequest
from areal_hpc.wire.proxy import SealTicketsReply

log = logging.getLogger(__name__)

IDLE_LEASE_LONG_POLL_S = 2.0
"""How long the ledger may keep the request of a driver that has nothing to do."""
IDLE_LEASE_PAUSE_S = 0.05
LEASE_REQUEST_TIMEOUT_S = 5.0
SEAL_TIMEOUT_S = 300.0
FAILED_SEAL_PAUSE_S = 2.0


class LeaseLoop:
    """Keeps the episode slots of one cell busy until the ledger says stop.

    One lease request is under way at a time, so that the ledger can take `held` and `finished`
    for the truth. A driver with work under way asks briefly and waits here, where it hears
    at once of a ticket that ended; an idle one lets the ledger keep its request.

    Nothing is leased while no replica of the cell serves. `tickets`, `gate` and `episode_watch`
    are shared with `runner`.
    """

    def __init__(
        self,
        job: RolloutJobConfig,
        *,
        runner: TicketRunner,
        tickets: LeasedTickets,
        services: ServiceClients,
        gate: ReplicaGate,
        episode_watch: EpisodeWatch,
        job_start: int = 0,
    ) -> None:
        self._cell, self._splits, self._job_start = job.cell, job.splits, job_start
        self._runner, self._tickets = runner, tickets
        self._ledger, self._proxy = services.ledger, services.proxy
        self._gate, self._watch = gate, episode_watch
        self._seal: asyncio.Task[None] | None = None
        self._clock = LedgerClockOffsetRecorder()

    async def run(self) -> None:
        """Lease tickets and start them until told to stop. Cancelling it cancels every episode."""
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(one.run()) for one in (self._gate, self._watch)]
            under_way = set[asyncio.Task[None]]()
            while not (reply := await self._send_heartbeat_and_request_lease()).stop:
                self._tickets.forget_finished(reply.over)
                for grant in reply.grants:
                    if self._tickets.hold_granted(grant):
                        under_way.add(task := group.create_task(self._runner.run(grant)))
                        task.add_done_callback(under_way.discard)
                self._record_activity_state()
                if reply.seal_now and not self._is_seal_request_under_way:
                    self._seal = group.create_task(self._request_seal())
                await self._wait_for_ticket_change_or_heartbeat(
                    reply.pause_s if self._needs_short_lease_request else IDLE_LEASE_PAUSE_S
                )
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
        sent_at = time.time()
        reply = await self._ledger.call_until_answered(
            "/lease", request, LeaseReply, timeout_s=LEASE_REQUEST_TIMEOUT_S + request.wait_s
        )
        self._clock.record_heartbeat_times(
            sent_at, reply.received_at, reply.answered_at, time.time()
        )
        return reply

    async def _wait_for_ticket_change_or_heartbeat(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._tickets.changed.wait()

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
