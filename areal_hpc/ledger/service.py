"""The ledger's answers: the pure state machine, made durable and made to wait.

Handlers change state between two awaits only, so each is atomic on the event loop. What must
be durable is written before it is answered, by blocking writes: a few per training step.
"""

import logging
from collections.abc import Callable, Mapping

import msgspec

from areal_hpc.errors import LedgerRequestError
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.ledger import batch_formation
from areal_hpc.ledger.admission import TicketPolicy
from areal_hpc.ledger.drop_stats import FirstTicketsCheck
from areal_hpc.ledger.evaluation import (
    EvaluationSetPart,
    EvaluationState,
    compute_result_metrics,
    read_current_results,
)
from areal_hpc.ledger.leases import CellHeartbeats
from areal_hpc.ledger.long_poll import LongPoll, Notifier
from areal_hpc.ledger.tasks.task_stream import TaskStream
from areal_hpc.ledger.tickets import TicketTable
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir import manifests
from areal_hpc.rundir.files import read_newest_number
from areal_hpc.rundir.manifests import DroppedTicket, LedgerState, append_drop, read_drops
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire import ledger as wire

log = logging.getLogger(__name__)

ACKNOWLEDGED = wire.Acknowledged()
TRAINER_POLL_SLACK_S = 1.0
"""A trainer that waits for a batch asks again within this."""


class LedgerService:
    """One method per route of `wire.ledger`."""

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
        """Rebuild the state from the run directory and count this start as an incarnation."""
        self._paths = paths
        self._policy = policy
        self._stream = stream
        self._evaluation_sets = dict(evaluation_sets)
        self._tasks_by_evaluation_set = dict(tasks_by_evaluation_set)
        self._clock = clock
        before = manifests.read_ledger_state(paths)
        self.incarnation = before.incarnation + 1
        """Which start of the run's ledger this is, from 1."""
        self._state = msgspec.structs.replace(before, incarnation=self.incarnation)
        self._listens_until_s = clock() + policy.expected_report_interval_s
        self._tickets = TicketTable.rebuild(
            policy,
            incarnation=self.incarnation,
            version_step=before.version_step,
            manifests=manifests.read_manifests(paths),
            dropped=read_drops(paths),
            settled=batch_formation.read_sealed_tickets(paths),
            # A new trainer may resume from before the version of the last ledger.
            grants_from_s=float("inf") if before.incarnation else clock(),
        )
        manifests.write_ledger_state(paths, self._state)
        self._first_tickets = FirstTicketsCheck()
        self._evaluation: EvaluationState | None = None
        """Of the sets of a step that have no result yet."""
        self._evaluated: tuple[int, dict[str, int]] = (-1, {})
        """The step that it is of, and the tasks of all sets that were asked for."""
        self._batch_wanted_until_s = float("-inf")
        self._stopped = paths.finished_marker.exists()
        self._work, self._progress = Notifier(), Notifier()
        self._index = batch_formation.SealedTicketChecker(paths)
        self._cells, self._ages = CellHeartbeats(), batch_formation.StalenessCheck()

    def collect_progress_gauges(self) -> dict[str, int]:
        """Numbers of tickets by where they are, of batches, and of starts of trainer and ledger."""
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
        """Take a heartbeat; grant work, if need be as soon as there is some."""
        self._apply_heartbeat(request)
        until_s = self._clock() + min(request.wait_s, self._policy.expected_report_interval_s)
        while not self._stopped:
            grants = self._grant_tickets(request)
            seal_now = self._is_sealing_urgent() and self._tickets.has_finished_tickets(
                request.cell
            )
            if grants or seal_now or not await long_poll.wait_for(self._work, until_s):
                over = self._tickets.select_released_from_cell(request.finished)
                return wire.LeaseReply(
                    grants, seal_now, over=over, pause_s=self._cells.heartbeat_interval_s
                )
        return wire.LeaseReply(stop=True)

    async def settle_tickets(self, request: wire.SettleTicketsRequest) -> wire.Acknowledged:
        """Take sealed tickets. Repeats, and tickets another cell settled first, change nothing."""
        for ticket in request.tickets:
            if fault := self._index.find_contradiction_with_index(ticket):
                raise LedgerRequestError(
                    409,
                    f"ticket {ticket.ref.ticket_id} of {ticket.shard} cannot be settled: {fault}",
                    hint="areal-hpc shards verify compares index/ and shards/",
                )
        for ticket in request.tickets:
            self._stream.record_rewards(ticket.ref.ticket_id, ticket.rewards)
            self._first_tickets.record_success(ticket.ref)
            if not self._tickets.settle(ticket):
                state = self._tickets.get_state(ticket.ref.ticket_id)
                log.info("%s settled %s, whose state is %s", request.cell, ticket.ref, state)
        self._notify_waiting()
        return ACKNOWLEDGED

    async def drop_ticket(self, request: wire.DropTicketRequest) -> wire.Acknowledged:
        """Give up on a ticket; a training ticket is replaced, a held-out task scores 0."""
        ref = request.ref
        if request.kind == "failed":
            self._first_tickets.record_failure(request)
        else:
            self._first_tickets.record_success(ref)
        if ref.eval_step >= 0:
            if self._evaluation is not None:
                self._evaluation.score_failed_task_zero(ref, request.reason)
        else:
            drop = DroppedTicket.from_request(request)
            self._stream.record_rewards(ref.ticket_id, drop.rewards)
            if self._tickets.drop(drop):
                log.info("ticket %d %s: %s", ref.ticket_id, drop.kind, drop.reason)
            if self._tickets.get_state(ref.ticket_id) in ("dropped", "filtered"):
                # A repeat is written again: it may follow a write that failed.
                append_drop(self._paths, drop)
        self._notify_waiting()
        return ACKNOWLEDGED

    async def record_evaluation_result(
        self, request: wire.EvaluationResultRequest
    ) -> wire.Acknowledged:
        """Take the rewards of one held-out task; results nobody waits for are forgotten."""
        if not request.rewards:
            raise LedgerRequestError(400, "an evaluated ticket needs at least one reward, got none")
        if self._evaluation is not None:
            self._first_tickets.record_success(request.ref)
            if self._evaluation.record_rewards(request.ref, request.rewards, request.answers):
                self._append_evaluated_ticket_to_disk(self._evaluation, request)
        self._notify_waiting()
        return ACKNOWLEDGED

    def expire_leases(self) -> None:
        """Re-issue what silent cells held. Call about every second."""
        now_s = self._clock()
        before_s = now_s - self._policy.cell_timeout_s
        lost = self._tickets.expire_leases(now_s)
        lost += self._evaluation.expire_leases(before_s) if self._evaluation else 0
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
        """Follow a new incarnation of the trainer, back to the step it resumes from."""
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
        if self._evaluation is not None and self._evaluation.step != request.evaluated_step:
            self._evaluation = None
        log.info("generation %d resumes after step %d", request.generation, request.base_step)
        return ACKNOWLEDGED

    async def hand_out_batch(
        self, request: wire.BatchRequest, long_poll: LongPoll
    ) -> wire.BatchReply:
        """The batch of a step: as handed out before, or formed now and durable first."""
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
        """Every replica serves the weights of `step`: admit tickets accordingly."""
        self._admit_trainer(request.generation)
        if request.step > self._tickets.version_step:
            self._save_state(msgspec.structs.replace(self._state, version_step=request.step))
        return ACKNOWLEDGED

    async def follow_evaluation(
        self, request: wire.EvaluateRequest, long_poll: LongPoll
    ) -> wire.EvaluateReply:
        """The evaluation of a step: started by the first call, followed by later ones."""
        for name, n_tasks in request.sets.items():
            known = self._tasks_by_evaluation_set
            if not 1 <= n_tasks <= known.get(name, 0):
                there = ", ".join(f"{count} of {one}" for one, count in known.items())
                raise LedgerRequestError(
                    400, f"cannot evaluate {n_tasks} tasks of {name!r}: there are {there or 'none'}"
                )
        until_s = self._clock() + request.wait_s
        while True:
            self._admit_trainer(request.generation)
            done, metrics = self._advance_evaluation(request.step, request.sets)
            trouble = self._first_tickets.find_problem()
            is_decided = metrics is not None or trouble
            if is_decided or not await long_poll.wait_for(self._progress, until_s):
                total = sum(request.sets.values())
                return wire.EvaluateReply(done, total, metrics, trouble)

    async def finish_run(self, request: wire.FinishRunRequest) -> wire.Acknowledged:
        """Tell every cell to go. The trainer has made `FINISHED` durable."""
        self._admit_trainer(request.generation)
        self._stopped = True
        self._notify_waiting()
        return ACKNOWLEDGED

    async def get_status(self, request: wire.Empty) -> wire.LedgerStatus:
        """Counts of tickets by state, and of cells."""
        tickets, evaluation = self._tickets, self._evaluation
        per_ticket = self._stream.episodes_per_ticket
        wanted = self._policy.batch_size * per_ticket
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
            eval_done=evaluation.n_episodes_done if evaluation else 0,
            eval_total=evaluation.n_episodes if evaluation else 0,
            cells=len(self._cells),
            formed_step=tickets.n_formed_batches,
            episodes_done=min(wanted, over + self._cells.ended_episodes_of_open_tickets),
            episodes_wanted=wanted,
            slowest_episode_s=self._cells.oldest_running_episode_s,
        )

    # Inside ----------------------------------------------------------------------------------

    def _apply_heartbeat(self, request: wire.LeaseRequest) -> None:
        now_s = self._clock()
        self._cells.record(request, now_s)
        held = [ref for ref in request.held if ref.eval_step < 0]
        self._tickets.reconcile_cell_report(request.cell, held, request.finished, now_s)
        if self._evaluation is not None:
            self._evaluation.reconcile_cell_report(request.cell, request.held, now_s)
        if request.finished:
            self._notify_waiting()

    def _grant_tickets(self, request: wire.LeaseRequest) -> list[wire.TicketGrant]:
        now_s, refs, capacity = self._clock(), list[wire.TicketRef](), request.capacity
        if self._evaluation is not None and "valid" in request.splits:
            refs = self._evaluation.lease_tickets(request.cell, capacity, now_s)
            capacity = max(0, capacity - self._evaluation.count_episodes_of_tickets(refs))
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
            or (self._evaluation is not None and self._evaluation.n_pending)
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
                hint="ask for the steps in order",
            )
        generation, forks = request.generation, self._state.forks
        for drop in self._ages.find_stale_tickets_to_drop(tickets, generation, forks):
            self._check_newest_generation_on_disk(generation)
            append_drop(self._paths, drop)  # durable first: its rows are never trained
            tickets.drop_settled_ticket(drop)
            self._notify_waiting()
        if manifest := batch_formation.build_next_batch_manifest(tickets, generation, forks):
            # A ledger left over from an earlier trainer must not decide the new one's batch.
            self._check_newest_generation_on_disk(generation)
            manifest = manifests.write_manifest(self._paths, manifest)
            tickets.record_batch(manifest)
            self._batch_wanted_until_s = float("-inf")
        return manifest

    def _advance_evaluation(
        self, step: int, n_tasks_by_set: dict[str, int]
    ) -> tuple[int, dict[str, float] | None]:
        """Tasks done, and the metrics once all are. A new one takes the place of the last.

        A set is durable as soon as it is done: only the others are played again after a crash.
        """
        evaluation, asked = self._evaluation, (step, n_tasks_by_set)
        if evaluation is None or self._evaluated != asked:
            results = read_current_results(self._paths, self._state, step, n_tasks_by_set)
            self._evaluated = asked
            self._evaluation = evaluation = self._build_evaluation_state(
                step, {name: n for name, n in n_tasks_by_set.items() if name not in results}
            )
            self._notify_waiting()
        for name, result in evaluation.build_unwritten_results():
            manifests.write_evaluation(self._paths, name, result)
            evaluation.written.add(name)
        total = sum(n_tasks_by_set.values())
        if evaluation.n_tasks_left:
            return total - evaluation.n_tasks_left, None
        self._evaluation = None
        done = {self._evaluation_sets[name].number for name in n_tasks_by_set}
        tickets = manifests.read_evaluated_tickets(self._paths, step)
        left = [one for one in tickets if split_ticket_id(one.ticket_id)[0] not in done]
        manifests.replace_evaluated_tickets(self._paths, step, left)
        results = read_current_results(self._paths, self._state, step, n_tasks_by_set)
        return total, compute_result_metrics(results, self._evaluation_sets)

    def _append_evaluated_ticket_to_disk(
        self, evaluation: EvaluationState, request: wire.EvaluationResultRequest
    ) -> None:
        """Have a restarted ledger play the task no more. What failed is not kept: it may be mended.

        A storage that refuses costs a repetition, and not the evaluation.
        """
        ticket = manifests.EvaluatedTicket(
            request.ref.ticket_id, evaluation.generation, request.rewards, request.answers
        )
        try:
            manifests.append_evaluated_ticket(self._paths, evaluation.step, ticket)
        except OSError as error:
            log.warning("the rewards of %s are in memory only: %s", request.ref, error)

    def _build_evaluation_state(
        self, step: int, n_tasks_by_set: Mapping[str, int]
    ) -> EvaluationState:
        known = self._evaluation_sets
        parts = {
            name: EvaluationSetPart(known[name].number, n_tasks, known[name].n_samples)
            for name, n_tasks in n_tasks_by_set.items()
        }
        evaluation = EvaluationState(
            step,
            parts,
            generation=self._state.generation,
            first_attempt=self._tickets.first_attempt,
        )
        for one in manifests.read_evaluated_tickets(self._paths, step):
            if self._state.has_kept_weights(step, one.generation):
                evaluation.restore_rewards(one)
        return evaluation

    def _save_state(self, state: LedgerState) -> None:
        # The newest trainer may have another ledger.
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
