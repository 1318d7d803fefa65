"""Handlers of the ledger's HTTP routes: they make `tickets.py` durable, and wait for changes.

Handlers change state only between two awaits, so each change is atomic on the event loop. Durable
state is written before the reply, by blocking writes: a few per training step.
"""

import logging
from collections.abc import Callable, Mapping

import msgspec

from areal_hpc.errors import LedgerRequestError
from areal_hpc.ledger.drop_stats import FirstTicketsCheck
from areal_hpc.ledger.evaluation import SetEvaluator
from areal_hpc.ledger.leases import CellHeartbeats
from areal_hpc.ledger.task_stream import TaskStream
from areal_hpc.ledger.tickets import TicketPolicy, TicketTable
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir import manifests
from areal_hpc.rundir.files import read_newest_number
from areal_hpc.rundir.manifests import DroppedTicket, LedgerState, append_drop, read_drops
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import IndexFollower, read_sealed_tickets
from areal_hpc.wire import ledger as wire
from areal_hpc.wire.http_server import LongPoll, Notifier

log = logging.getLogger(__name__)

ACKNOWLEDGED = wire.Acknowledged()
TRAINER_POLL_SLACK_S = 1.0
"""Time within which a trainer that waits for a batch repeats its request."""


class LedgerService:
    """Ledger with one method per route of `wire.ledger`."""

    def __init__(
        self,
        paths: RunPaths,
        policy: TicketPolicy,
        stream: TaskStream,
        *,
        evaluation_sets: Mapping[str, EvaluationSet],
        tasks_by_evaluation_set: Mapping[str, int],
        clock: Callable[[], float],
    ) -> None:
        """Rebuild the state from the run directory, and count this start as an incarnation."""
        self._paths = paths
        self._policy = policy
        self._stream = stream
        self._evaluator = SetEvaluator(paths, evaluation_sets)
        self._tasks_by_evaluation_set = dict(tasks_by_evaluation_set)
        self._clock = clock
        old_state = manifests.read_ledger_state(paths)
        self.incarnation = old_state.incarnation + 1
        """Number of this start of the run's ledger, from 1."""
        self._state = msgspec.structs.replace(old_state, incarnation=self.incarnation)
        self._listens_until_s = clock() + policy.expected_report_interval_s
        self._tickets = TicketTable.rebuild(
            policy,
            incarnation=self.incarnation,
            version_step=old_state.version_step,
            manifests=manifests.read_manifests(paths),
            dropped=read_drops(paths),
            settled=read_sealed_tickets(paths.shard_index_dir),
            # A new trainer may resume from a step before the last ledger's version.
            grants_from_s=float("inf") if old_state.incarnation else clock(),
        )
        manifests.write_ledger_state(paths, self._state)
        self._first_tickets = FirstTicketsCheck()
        self._batch_wanted_until_s = float("-inf")
        self._stopped = paths.finished_marker.exists()
        self._work, self._progress = Notifier(), Notifier()
        self._index = IndexFollower(paths.shard_index_dir)
        self._cells = CellHeartbeats()

    def collect_progress_gauges(self) -> dict[str, int]:
        """Collect numbers of tickets by state, of batches, and of starts of trainer and ledger."""
        tickets = self._tickets
        return {
            "tickets_leased": tickets.n_leased,
            "tickets_awaiting_seal": tickets.n_awaiting_seal,
            "tickets_ready_for_batch": tickets.n_ready_for_batch,
            "tickets_in_unpublished_batches": tickets.n_in_unpublished_batches,
            "tickets_trained": tickets.n_trained,
            "batches_formed": tickets.n_formed_batches,
            "published_step": self._state.version_step,
            "trainer_generation": self._state.generation,
            "incarnation": self.incarnation,
        }

    # Cells -----------------------------------------------------------------------------------

    async def lease_tickets_to_cell(
        self, request: wire.LeaseRequest, long_poll: LongPoll
    ) -> wire.LeaseReply:
        """Record a heartbeat, and grant tickets, by long poll if none can be granted now."""
        self._apply_heartbeat(request)
        until_s = self._clock() + min(request.wait_s, self._policy.expected_report_interval_s)
        while not self._stopped:
            grants = self._grant_tickets(request)
            seal_now = self._is_sealing_urgent() and self._tickets.has_finished_tickets(
                request.cell
            )
            if grants or seal_now or not await long_poll.wait_for(self._work, until_s):
                released = self._tickets.select_released_from_cell(request.finished)
                return wire.LeaseReply(
                    grants, seal_now, over=released, pause_s=self._cells.heartbeat_interval_s
                )
        return wire.LeaseReply(stop=True)

    async def settle_shards(self, request: wire.SettleShardsRequest) -> wire.Acknowledged:
        """Settle the tickets of sealed shards, which it reads from the index.

        A proxy writes a shard's line before it settles. Repeats, and tickets that another cell
        settled first, change nothing.
        """
        tickets: list[wire.SealedTicket] = []
        for name in request.shards:
            if (shard := self._index.find(name)) is None:
                raise LedgerRequestError(
                    409,
                    f"{name} cannot be settled: the index has no line of that shard",
                    hint="areal-hpc shards verify compares index/ and shards/",
                )
            tickets += shard.list_sealed_tickets()
        for ticket in tickets:
            self._stream.record_rewards(ticket.ref.ticket_id, ticket.rewards)
            self._first_tickets.record_success(ticket.ref)
            if not self._tickets.settle(ticket):
                state = self._tickets.get_state(ticket.ref.ticket_id)
                log.info("%s settled %s, whose state is %s", request.cell, ticket.ref, state)
        self._notify_waiting()
        return ACKNOWLEDGED

    async def drop_ticket(self, request: wire.DropTicketRequest) -> wire.Acknowledged:
        """Drop a ticket; a training ticket is replaced, a held-out task scores 0."""
        ref = request.ref
        if request.kind == "failed":
            self._first_tickets.record_failure(request)
        else:
            self._first_tickets.record_success(ref)
        if ref.eval_step >= 0:
            self._evaluator.tickets.score_failed_task_zero(ref, request.reason)
        else:
            drop = DroppedTicket(ref, request.reason, request.kind, request.rewards)
            self._stream.record_rewards(ref.ticket_id, drop.rewards)
            if self._tickets.drop(drop):
                log.info("ticket %d %s: %s", ref.ticket_id, drop.kind, drop.reason)
            if self._tickets.get_state(ref.ticket_id) in ("dropped", "filtered"):
                # A repeated request is written again, as the first write may have failed.
                append_drop(self._paths, drop)
        self._notify_waiting()
        return ACKNOWLEDGED

    async def record_evaluation_result(
        self, request: wire.EvaluationResultRequest
    ) -> wire.Acknowledged:
        """Record the rewards of one held-out task; those of another evaluation are ignored."""
        self._first_tickets.record_success(request.ref)
        self._evaluator.record_result(request)
        self._notify_waiting()
        return ACKNOWLEDGED

    def expire_leases(self) -> None:
        """Make the tickets of silent cells available again. Call it about every second."""
        now_s = self._clock()
        before_s = now_s - self._policy.cell_timeout_s
        lost = self._tickets.expire_leases(now_s) + self._evaluator.tickets.expire_leases(before_s)
        if lost:
            log.warning(
                "%d tickets expired: no heartbeat for %s s", lost, self._policy.cell_timeout_s
            )
        self._cells.forget_silent_cells(before_s)
        self._notify_waiting()

    # The trainer -----------------------------------------------------------------------------

    async def open_generation(
        self, request: wire.OpenTrainerGenerationRequest
    ) -> wire.Acknowledged:
        """Switch to a new generation of the trainer, and back to the step that it resumes from."""
        newest = read_newest_number(self._paths.generations_dir)
        if not 1 <= request.generation <= newest:
            raise LedgerRequestError(
                400,
                f"no trainer has taken generation {request.generation}: the newest is {newest}",
                hint="take the next number in generations/ first",
            )
        self._save_state(self._state.with_opened_generation(request.generation, request.base_step))
        self._schedule_first_grant()
        self._first_tickets = FirstTicketsCheck()
        if self._evaluator.tickets.step != request.evaluated_step:
            self._evaluator.give_up()
        log.info("generation %d resumes after step %d", request.generation, request.base_step)
        return ACKNOWLEDGED

    async def hand_out_batch(
        self, request: wire.BatchRequest, long_poll: LongPoll
    ) -> wire.BatchReply:
        """Return the batch of a step, read again or formed now and written first."""
        until_s = self._clock() + request.wait_s
        while True:
            self._admit_trainer(request.generation)
            manifest = self._find_manifest(request)
            trouble = (
                ""
                if manifest
                else (
                    self._first_tickets.find_problem()
                    or self._stream.trouble
                    or self._tickets.drop_stats.find_problem()
                )
            )
            if manifest is None and not trouble:
                self._batch_wanted_until_s = until_s + TRAINER_POLL_SLACK_S
                if self._is_sealing_urgent():
                    self._work.notify_all()
                if await long_poll.wait_for(self._progress, until_s):
                    continue
            idle_cell_s = self._cells.pop_idle_s() if manifest else 0.0
            return wire.BatchReply(manifest, self._tickets.n_ready_for_batch, trouble, idle_cell_s)

    async def record_published_step(
        self, request: wire.WeightsPublishedRequest
    ) -> wire.Acknowledged:
        """Record the step whose weights replicas serve, on which admission depends."""
        self._admit_trainer(request.generation)
        if request.step > self._tickets.version_step:
            self._save_state(msgspec.structs.replace(self._state, version_step=request.step))
        return ACKNOWLEDGED

    async def follow_evaluation(
        self, request: wire.EvaluateRequest, long_poll: LongPoll
    ) -> wire.EvaluateReply:
        """Start the evaluation of a step at the first call, and report its progress."""
        for name, n_tasks in request.sets.items():
            counts = self._tasks_by_evaluation_set
            if not 1 <= n_tasks <= counts.get(name, 0):
                known = ", ".join(f"{count} of {set_name}" for set_name, count in counts.items())
                raise LedgerRequestError(
                    400, f"cannot evaluate {n_tasks} tasks of {name!r}: there are {known or 'none'}"
                )
        until_s = self._clock() + request.wait_s
        while True:
            self._admit_trainer(request.generation)
            first_attempt = self._tickets.first_attempt
            if self._evaluator.begin(request.step, request.sets, self._state, first_attempt):
                self._notify_waiting()
            done, metrics = self._evaluator.advance(self._state)
            trouble = self._first_tickets.find_problem()
            is_decided = metrics is not None or trouble
            if is_decided or not await long_poll.wait_for(self._progress, until_s):
                total = sum(request.sets.values())
                return wire.EvaluateReply(done, total, metrics, trouble)

    async def finish_run(self, request: wire.FinishRunRequest) -> wire.Acknowledged:
        """Stop all cells at their next lease request, after the trainer has written `FINISHED`."""
        self._admit_trainer(request.generation)
        self._stopped = True
        self._notify_waiting()
        return ACKNOWLEDGED

    async def get_status(self, request: wire.Empty) -> wire.LedgerStatus:
        tickets, evaluation = self._tickets, self._evaluator.tickets
        per_ticket = self._stream.episodes_per_ticket
        episodes_wanted = self._policy.batch_size * per_ticket
        over = per_ticket * (tickets.n_awaiting_seal + tickets.n_ready_for_batch)
        return wire.LedgerStatus(
            generation=self._state.generation,
            version_step=tickets.version_step,
            leased=tickets.n_leased,
            finished=tickets.n_awaiting_seal,
            settled=tickets.n_ready_for_batch,
            trained=tickets.n_trained,
            dropped=tickets.drop_stats.count_drops("failed", "stale"),
            filtered=tickets.drop_stats.count_drops("filtered"),
            eval_done=evaluation.n_episodes_done,
            eval_total=evaluation.n_episodes,
            cells=len(self._cells),
            formed_step=tickets.n_formed_batches,
            episodes_done=min(episodes_wanted, over + self._cells.ended_episodes_of_open_tickets),
            episodes_wanted=episodes_wanted,
            slowest_episode_s=self._cells.oldest_running_episode_s,
            episode_slots=self._cells.episode_slots,
        )

    # Internals -------------------------------------------------------------------------------

    def _apply_heartbeat(self, request: wire.LeaseRequest) -> None:
        now_s = self._clock()
        self._cells.record(request, now_s)
        held_training = [ref for ref in request.held if ref.eval_step < 0]
        self._tickets.reconcile_cell_report(request.cell, held_training, request.finished, now_s)
        self._evaluator.tickets.reconcile_cell_report(request.cell, request.held, now_s)
        if request.finished:
            self._notify_waiting()

    def _grant_tickets(self, request: wire.LeaseRequest) -> list[wire.TicketGrant]:
        now_s, refs, capacity = self._clock(), list[wire.TicketRef](), request.capacity
        if "valid" in request.splits:
            refs = self._evaluator.tickets.lease_tickets(request.cell, capacity, now_s)
            episodes = self._evaluator.tickets.count_episodes_of_tickets(refs)
            capacity = max(0, capacity - episodes)
        if "train" in request.splits:
            groups = capacity // self._stream.episodes_per_ticket
            refs += self._tickets.lease_tickets(request.cell, groups, now_s)
        return self._stream.build_grants(refs)

    def _is_sealing_urgent(self) -> bool:
        tickets = self._tickets
        return tickets.sealing_completes_batch() and (
            self._clock() < self._batch_wanted_until_s or tickets.count_leasable() <= 0
        )

    def _notify_waiting(self) -> None:
        self._progress.notify_all()
        if (
            self._stopped
            or self._evaluator.tickets.n_pending
            or self._tickets.count_leasable() > 0
            or self._is_sealing_urgent()
        ):
            self._work.notify_all()

    def _find_manifest(self, request: wire.BatchRequest) -> wire.BatchManifest | None:
        step, tickets = request.step, self._tickets
        if 1 <= step <= tickets.n_formed_batches:
            return manifests.read_manifest(self._paths, step)
        formed, total = tickets.n_formed_batches, self._policy.total_steps
        if step != formed + 1 or step > total:
            raise LedgerRequestError(
                400,
                f"there is no batch for step {step}: {formed} of {total} were handed out",
                hint="request the steps in order",
            )
        generation, forks = request.generation, self._state.forks
        for drop in tickets.find_stale_tickets(generation, forks):
            self._check_newest_generation_on_disk(generation)
            append_drop(self._paths, drop)  # durable first, so that its rows are never trained
            tickets.drop_settled_ticket(drop)
            self._notify_waiting()
        if manifest := tickets.build_next_batch(generation, forks):
            # A ledger of an earlier trainer that still runs must not form the new one's batch.
            self._check_newest_generation_on_disk(generation)
            manifest = manifests.write_manifest(self._paths, manifest)
            tickets.record_batch(manifest)
            self._batch_wanted_until_s = float("-inf")
        return manifest

    def _save_state(self, state: LedgerState) -> None:
        # A newer trainer may use another ledger.
        self._check_newest_generation_on_disk(state.generation)
        step, formed = state.version_step, self._tickets.n_formed_batches
        if not 0 <= step <= formed:
            raise LedgerRequestError(
                400,
                f"step {step} does not exist: batches 1 to {formed} were handed out",
                hint="check that manifests/ and checkpoints/ belong to the same run",
            )
        if state != self._state:
            manifests.write_ledger_state(self._paths, state)
            self._state = state
        self._tickets.set_version_step(state.version_step)
        self._notify_waiting()

    def _admit_trainer(self, generation: int) -> None:
        current = self._state.generation
        if generation > current:
            raise LedgerRequestError(
                409,
                f"this run is in generation {current}, the request came from {generation}",
                hint="call /open_generation first",
            )
        _refuse_older_generation(generation, current)
        if self._tickets.grants_from_s == float("inf"):
            self._check_newest_generation_on_disk(generation)
            self._schedule_first_grant()

    def _schedule_first_grant(self) -> None:
        self._tickets.grants_from_s = min(self._tickets.grants_from_s, self._listens_until_s)

    def _check_newest_generation_on_disk(self, generation: int) -> None:
        newest = read_newest_number(self._paths.generations_dir)
        _refuse_older_generation(generation, max(self._state.generation, newest))


def _refuse_older_generation(generation: int, newest: int) -> None:
    if generation < newest:
        raise LedgerRequestError(
            409,
            f"trainer generation {generation} was replaced by {newest}",
            hint="stop this trainer: a newer one has taken over",
        )
