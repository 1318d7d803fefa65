"""State machine of training tickets: admission, staleness, batches; no I/O, no clock.

A ticket is the permission to run a group of episodes of one task. Its id is its position in
the task stream. It is in exactly one of these states:

    unissued -> leased -> finished -> settled -> batched -> trained
                  |  ^        |
          silence v  | lease  v silence
                 waiting <----+

    leased | finished | waiting | settled -> dropped | filtered

`waiting` tickets lost their cell; they are issued again, with a higher attempt, before any new one.
A ticket that a late cell settles counts once, with any attempt. Training batch `step` makes version
`step`; tickets of batches above the published step are unconsumed.

Admission keeps tickets within the bound of staleness if they settle in the order of their leases.
A slow episode, a ticket that was issued again, or a trainer that resumed from an earlier step can
still bring older tokens. With `stale_groups=drop` these are dropped.

Admission counts the containers below, so that no counter can drift.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from areal_hpc.errors import ClusterError
from areal_hpc.ledger.drop_stats import DropStats
from areal_hpc.ledger.leases import Lease, LeaseTable
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.manifests import DroppedTicket
from areal_hpc.wire.ledger import (
    NO_VERSION,
    BatchManifest,
    SealedTicket,
    StaleGroupPolicy,
    TicketRef,
)
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness_steps

ATTEMPT_NUMBERS_PER_INCARNATION = 1000
"""Attempts of the k-th start of the ledger begin above (k - 1) times this. Attempts are not
written to disk; a restarted ledger must still never issue the same (ticket, attempt) twice."""

ReleasedFromCellState = Literal["settled", "batched", "trained", "dropped", "filtered"]
"""States in which no cell need report the ticket."""
RELEASED_FROM_CELL_STATES = get_args(ReleasedFromCellState)
TicketState = Literal["unissued", "waiting", "leased", "finished"] | ReleasedFromCellState


@dataclass(frozen=True, slots=True)
class TicketPolicy:
    """Limits of admission. Sizes count tickets, not episodes."""

    batch_size: int
    max_head_offpolicyness: int
    max_concurrent_tickets: int
    total_steps: int
    cell_timeout_s: float
    stale_groups: StaleGroupPolicy = "train_with_correction"

    @classmethod
    def from_recipe(cls, recipe: Recipe, cell_timeout_s: float, *, trains: bool) -> TicketPolicy:
        """Read a recipe's limits; without a trainer every finished ticket is a batch of its own."""
        rollout = recipe.rollout
        concurrent = rollout.max_concurrent_rollouts // rollout.episodes_per_ticket
        return cls(
            batch_size=recipe.trainer.batch_size if trains else 1,
            max_head_offpolicyness=rollout.max_head_offpolicyness if trains else 0,
            max_concurrent_tickets=max(1, concurrent),
            total_steps=recipe.trainer.total_steps if trains else 1,
            cell_timeout_s=cell_timeout_s,
            stale_groups=rollout.stale_groups,
        )

    @property
    def max_unrecorded_tickets(self) -> int:
        """Bound on the tickets that an earlier start of the ledger issued without a trace on disk.

        That start's limits may have been ten times these; higher ids are invalid.
        """
        return 1000 + 10 * (self.max_head_offpolicyness + 1) * self.batch_size

    @property
    def expected_report_interval_s(self) -> float:
        return self.cell_timeout_s / 3


@dataclass(frozen=True, slots=True)
class TicketCounts:
    """Numbers of tickets by state, and of batches handed out."""

    leased: int
    awaiting_seal: int
    settled: int
    in_unpublished_batches: int
    formed_batches: int

    @property
    def held_by_cells(self) -> int:
        return self.leased + self.awaiting_seal


def count_admissible_tickets(policy: TicketPolicy, counts: TicketCounts) -> int:
    """Count the tickets that may be leased now, at least 0.

    The rule is that of AReaL (arXiv 2505.24298, section 5.1; `areal/infra/staleness_manager.py`).
    The counts are of tickets by their present states: a ticket that was dropped or filtered, or
    that waits to be issued again, is in no count. The result is the least of three limits:

    - concurrency: tickets that run;
    - staleness: a ticket leased at version v joins a batch no later than v + 1 +
      max_head_offpolicyness if tickets settle in the order of their leases, so 0 is exactly
      synchronous; one that takes longer still counts, which delays others;
    - need: tickets that the remaining steps lack.
    """
    unbatched = counts.held_by_cells + counts.settled
    concurrency = policy.max_concurrent_tickets - counts.leased
    ahead = (policy.max_head_offpolicyness + 1) * policy.batch_size
    staleness = ahead - unbatched - counts.in_unpublished_batches
    need = (policy.total_steps - counts.formed_batches) * policy.batch_size - unbatched
    return max(0, min(concurrency, staleness, need))


class TicketTable:
    """States of all training tickets of a run, and their transitions, each of which is O(1)."""

    def __init__(
        self, policy: TicketPolicy, *, incarnation: int = 1, grants_from_s: float = float("-inf")
    ) -> None:
        self.policy = policy
        self.version_step = 0
        """Step whose weights replicas serve, or get before they serve again."""
        self.grants_from_s = grants_from_s
        """Time of the first grant: after a restart, cells first report the tickets that they hold,
        so that a running ticket is not issued again."""
        self.first_attempt = (incarnation - 1) * ATTEMPT_NUMBERS_PER_INCARNATION + 1
        """First attempt of this start of the ledger; earlier starts issued the ones below."""
        self._next_id = 0
        self._waiting: OrderedDict[int, int] = OrderedDict()  # id -> newest attempt issued
        self._leased = LeaseTable()
        self._finished = LeaseTable()
        self._settled: OrderedDict[int, SealedTicket] = OrderedDict()  # in arrival order
        self._batched: dict[int, int] = {}  # id -> step
        self._batch_sizes: list[int] = []  # of steps 1, 2, ...
        self.drop_stats = DropStats(policy.batch_size)
        self._checked_version: WeightVersion | None = None
        self._n_checked = 0
        """Number of first settled tickets that are not stale for a step from `_checked_version`."""

    @classmethod
    def rebuild(
        cls,
        policy: TicketPolicy,
        *,
        incarnation: int,
        version_step: int,
        manifests: Iterable[BatchManifest],
        dropped: Iterable[DroppedTicket],
        settled: Iterable[SealedTicket],
        grants_from_s: float,
    ) -> TicketTable:
        """Rebuild the state after a restart from the files of the run.

        Manifests win over the shard index: a ticket sealed twice is in the batch that took it.
        Ids in between without a trace on disk are waiting; a cell that still holds one reports it.
        """
        tickets = cls(policy, incarnation=incarnation, grants_from_s=grants_from_s)
        for manifest in manifests:
            tickets.record_batch(manifest)
        for drop in dropped:
            tickets._mark_unseen_waiting(drop.ref.ticket_id)
            tickets.drop(drop)
        tickets.drop_stats.reset_streaks()
        sealed = list(settled)
        for ticket_id in sorted(ticket.ref.ticket_id for ticket in sealed):
            tickets._assume_issued_up_to(ticket_id)
        for ticket in sealed:
            tickets.settle(ticket)
        tickets.set_version_step(min(version_step, tickets.n_formed_batches))
        return tickets

    # States ----------------------------------------------------------------------------------

    @property
    def n_leased(self) -> int:
        return len(self._leased)

    @property
    def n_awaiting_seal(self) -> int:
        return len(self._finished)

    @property
    def n_ready_for_batch(self) -> int:
        return len(self._settled)

    @property
    def n_formed_batches(self) -> int:
        return len(self._batch_sizes)

    @property
    def n_trained(self) -> int:
        return sum(self._batch_sizes[: self.version_step])

    @property
    def n_in_unpublished_batches(self) -> int:
        return sum(self._batch_sizes[self.version_step :])

    def get_state(self, ticket_id: int) -> TicketState:
        if ticket_id in self._batched:
            return "trained" if self._batched[ticket_id] <= self.version_step else "batched"
        if kind := self.drop_stats.get_drop_kind(ticket_id):
            return "filtered" if kind == "filtered" else "dropped"
        containers: tuple[tuple[TicketState, Container[int]], ...] = (
            ("waiting", self._waiting),
            ("leased", self._leased),
            ("finished", self._finished),
            ("settled", self._settled),
        )
        return next((state for state, ids in containers if ticket_id in ids), "unissued")

    def select_released_from_cell(self, refs: Sequence[TicketRef]) -> list[TicketRef]:
        """Select the finished tickets that their cell need not report again."""
        return [ref for ref in refs if self.get_state(ref.ticket_id) in RELEASED_FROM_CELL_STATES]

    def count_leasable(self) -> int:
        counts = TicketCounts(
            self.n_leased,
            self.n_awaiting_seal,
            self.n_ready_for_batch,
            self.n_in_unpublished_batches,
            self.n_formed_batches,
        )
        return count_admissible_tickets(self.policy, counts)

    def has_finished_tickets(self, cell: str) -> bool:
        return self._finished.has_any_of_cell(cell)

    def sealing_completes_batch(self) -> bool:
        settled, batch_size = len(self._settled), self.policy.batch_size
        return settled < batch_size <= settled + len(self._finished)

    # Events of cells -------------------------------------------------------------------------

    def reconcile_cell_report(
        self, cell: str, running: Sequence[TicketRef], finished: Sequence[TicketRef], now_s: float
    ) -> None:
        """Update the leases of a cell from its report of running and finished tickets.

        A waiting ticket that the cell reports is leased to it again; a leased one that it does not
        report waits again. Reports on tickets of other cells are ignored.
        """
        for ref in running:
            if not self._leased.touch(ref.ticket_id, cell, ref.attempt, now_s):
                self._restore_lease(cell, ref, self._leased, now_s)
        for ref in finished:
            if self._finished.touch(ref.ticket_id, cell, ref.attempt, now_s):
                continue
            if self._leased.touch(ref.ticket_id, cell, ref.attempt, now_s):
                lease = self._leased.pop(ref.ticket_id)
                assert lease is not None
                self._finished.add(ref.ticket_id, lease)
            else:
                self._restore_lease(cell, ref, self._finished, now_s)
        # A driver sends a request only after it has processed the last reply. So the reply was lost
        # if it does not report a granted ticket, or the driver was restarted.
        reported = {ref.ticket_id for ref in (*running, *finished)}
        for ticket_id, lease in self._leased.pop_unreported(cell, reported):
            self._waiting[ticket_id] = lease.newest_attempt

    def lease_tickets(self, cell: str, count: int, now_s: float) -> list[TicketRef]:
        """Issue up to `count` tickets to `cell`, re-issues first."""
        if now_s < self.grants_from_s:
            return []
        refs: list[TicketRef] = []
        for _ in range(min(count, self.count_leasable())):
            if self._waiting:
                ticket_id, newest = self._waiting.popitem(last=False)
            else:
                ticket_id, newest = self._next_id, self.first_attempt - 1
                self._next_id += 1
            self._leased.add(ticket_id, Lease(cell, newest + 1, newest + 1, now_s))
            refs.append(TicketRef(ticket_id, newest + 1))
        return refs

    def settle(self, ticket: SealedTicket) -> bool:
        """Settle a ticket sealed by any cell; return False if it is settled or dropped already."""
        self._recall_earlier_ticket(ticket.ref)
        if not self._pop_unsettled(ticket.ref.ticket_id):
            return False
        self._settled[ticket.ref.ticket_id] = ticket
        self.drop_stats.record_settled_ticket()
        return True

    def drop(self, dropped_ticket: DroppedTicket) -> bool:
        """Drop a ticket; return False if another attempt has the lease, or it is settled."""
        ref = dropped_ticket.ref
        self._recall_earlier_ticket(ref)
        lease = self._leased.get(ref.ticket_id) or self._finished.get(ref.ticket_id)
        if (lease and lease.attempt != ref.attempt) or not self._pop_unsettled(ref.ticket_id):
            return False
        self.drop_stats.record_drop(dropped_ticket)
        return True

    def drop_settled_ticket(self, dropped_ticket: DroppedTicket) -> None:
        del self._settled[dropped_ticket.ref.ticket_id]
        self.drop_stats.record_drop(dropped_ticket)

    def expire_leases(self, now_s: float) -> int:
        """Make the tickets of silent cells waiting, and return their number."""
        before_s = now_s - self.policy.cell_timeout_s
        silent = self._leased.pop_silent(before_s) + self._finished.pop_silent(before_s)
        for ticket_id, lease in silent:
            self._waiting[ticket_id] = lease.newest_attempt
        return len(silent)

    # Events of the trainer -------------------------------------------------------------------

    def find_stale_tickets(
        self, generation: int, forks: Sequence[GenerationFork]
    ) -> list[DroppedTicket]:
        """Find the settled tickets to drop before `generation` trains its next batch.

        With `stale_groups=train_with_correction` there are none. `forks` are all generations of
        the run. With a thousand nodes this runs thousands of times a second, so each ticket is
        checked once a batch.
        """
        current = WeightVersion(generation, self.n_formed_batches)
        n_checked = self._n_checked if current == self._checked_version else 0
        is_corrected = self.policy.stale_groups == "train_with_correction"
        if is_corrected or n_checked == self.n_ready_for_batch:
            return []
        limit = self.policy.max_head_offpolicyness
        stale = [
            DroppedTicket(ticket.ref, f"sampled {age} steps ago; the limit is {limit}", "stale")
            for ticket in islice(self._settled.values(), n_checked, None)
            if (age := _compute_age_steps(ticket, current, forks)) > limit
        ]
        self._checked_version = None if stale else current
        self._n_checked = 0 if stale else self.n_ready_for_batch
        return stale

    def build_next_batch(
        self, generation: int, forks: Sequence[GenerationFork] = ()
    ) -> BatchManifest | None:
        """Build the batch of step `n_formed_batches + 1`, or None if too few tickets are settled.

        It has the first settled tickets, in that order, so the same arrivals give the same batches.
        It changes no state: the caller writes it to disk, and then calls `record_batch`.
        """
        size, formed = self.policy.batch_size, self.n_formed_batches
        if self.n_ready_for_batch < size or formed >= self.policy.total_steps:
            return None
        taken = list(islice(self._settled.values(), size))
        current, limit = WeightVersion(generation, formed), self.policy.max_head_offpolicyness
        stale = sum(_compute_age_steps(ticket, current, forks) > limit for ticket in taken)
        counts = self.drop_stats.build_batch_counts(stale)
        return BatchManifest(formed + 1, generation, taken, counts)

    def record_batch(self, manifest: BatchManifest) -> None:
        """Record a durable manifest; raise ClusterError if its step or a ticket does not fit."""
        if manifest.step != self.n_formed_batches + 1:
            raise ClusterError(
                f"the manifest of step {self.n_formed_batches + 1} is missing: "
                f"found step {manifest.step} next",
                key="manifests/",
                hint="restore manifests/ of the run; files are never deleted from it",
            )
        for ticket in manifest.tickets:
            ticket_id = ticket.ref.ticket_id
            if ticket_id in self._batched:
                raise ClusterError(
                    f"ticket {ticket_id} is in the batches of steps {self._batched[ticket_id]} "
                    f"and {manifest.step}",
                    key="manifests/",
                )
            self._mark_unseen_waiting(ticket_id)
            self._pop_unsettled(ticket_id)
            self._settled.pop(ticket_id, None)
            self._batched[ticket_id] = manifest.step
        self._batch_sizes.append(len(manifest.tickets))
        self.drop_stats.mark_reported_in_manifest(manifest.counts)

    def set_version_step(self, step: int) -> None:
        self.version_step = step

    # Internals -------------------------------------------------------------------------------

    def _pop_unsettled(self, ticket_id: int) -> bool:
        if self._waiting.pop(ticket_id, None) is not None:
            return True
        return (self._leased.pop(ticket_id) or self._finished.pop(ticket_id)) is not None

    def _restore_lease(self, cell: str, ref: TicketRef, table: LeaseTable, now_s: float) -> None:
        self._recall_earlier_ticket(ref)
        if ref.ticket_id in self._waiting:
            newest = max(self._waiting.pop(ref.ticket_id), ref.attempt)
            table.add(ref.ticket_id, Lease(cell, ref.attempt, newest, now_s))

    def _recall_earlier_ticket(self, ref: TicketRef) -> None:
        if 0 < ref.attempt < self.first_attempt:
            self._assume_issued_up_to(ref.ticket_id)

    def _assume_issued_up_to(self, ticket_id: int) -> None:
        if ticket_id < self._next_id + self.policy.max_unrecorded_tickets:
            self._mark_unseen_waiting(ticket_id)

    def _mark_unseen_waiting(self, ticket_id: int) -> None:
        for unseen in range(self._next_id, ticket_id + 1):
            self._waiting[unseen] = self.first_attempt - 1
        self._next_id = max(self._next_id, ticket_id + 1)


def _compute_age_steps(
    ticket: SealedTicket, current: WeightVersion, forks: Sequence[GenerationFork]
) -> int:
    if ticket.oldest_version == NO_VERSION:
        return 0
    return compute_staleness_steps(current, WeightVersion.unpack(ticket.oldest_version), forks)
