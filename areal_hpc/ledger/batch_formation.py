"""Batch formation: which settled tickets form the next batch, and which are too stale.

Admission keeps tickets within the bound as long as they settle in the order of their leases. An
episode that is overtaken by others, a ticket that was issued again, or a trainer that went back
can still bring tokens that are older.
"""

from collections.abc import Iterator, Sequence

from areal_hpc.ledger.tickets import TicketTable
from areal_hpc.rundir.manifests import DroppedTicket
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import IndexFollower, ShardTicket, read_index
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion, compute_staleness_steps


def read_sealed_tickets(paths: RunPaths) -> Iterator[SealedTicket]:
    """Every ticket of every sealed shard, those of old batches and of lost races included."""
    for shard in read_index(paths.shard_index_dir):
        for ticket in shard.tickets:
            ref = TicketRef(ticket.ticket_id, ticket.attempt)
            yield SealedTicket(ref, shard.file, ticket.rows, ticket.rewards, ticket.oldest_version)


class SealedTicketChecker:
    """Compares tickets with the index: one counts only with the rows that it has there.

    A proxy writes the line first and settles then, so a ticket without one was made up, or lost.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._index = IndexFollower(paths.shard_index_dir)
        self._newest_file = ""
        self._newest_tickets: dict[tuple[int, int], ShardTicket] = {}
        """Of the shard that was asked for last, by id and attempt: its tickets settle together."""

    def find_contradiction_with_index(self, ticket: SealedTicket) -> str:
        """How the index contradicts a ticket; empty if it confirms it."""
        if ticket.shard != self._newest_file:
            line = self._index.find(ticket.shard)
            if line is None:
                return "the index has no line of that shard"
            self._newest_tickets = {(one.ticket_id, one.attempt): one for one in line.tickets}
            self._newest_file = ticket.shard
        one = self._newest_tickets.get((ticket.ref.ticket_id, ticket.ref.attempt))
        if one is None or ticket.ref.eval_step >= 0:  # those of evaluations are never settled
            return "that shard does not hold it"
        found = (one.rows, one.rewards, one.oldest_version)
        expected = (ticket.rows, ticket.rewards, ticket.oldest_version)
        return "" if found == expected else "the index has other rows or rewards of it"


def build_next_batch_manifest(
    tickets: TicketTable, generation: int, generation_forks: Sequence[GenerationFork] = ()
) -> BatchManifest | None:
    """The batch of step `n_formed_batches + 1`, or None while too few tickets are settled.

    The tickets that settled first, in that order: the same arrivals give the same batches.
    Changes nothing: the caller makes it durable and then calls `record_batch`.
    """
    policy, size = tickets.policy, tickets.policy.batch_size
    if tickets.n_ready_for_batch < size or tickets.n_formed_batches >= policy.total_steps:
        return None
    taken = tickets.list_first_settled(size)
    current = WeightVersion(generation, tickets.n_formed_batches)
    stale = sum(
        _compute_ticket_age_steps(one, current, generation_forks) > policy.max_head_offpolicyness
        for one in taken
    )
    return BatchManifest(
        tickets.n_formed_batches + 1,
        generation,
        taken,
        tickets.drop_stats.build_batch_counts(stale),
    )


class StalenessCheck:
    """Looks for tickets that are too old again and again, at each ticket once a batch.

    With a thousand nodes the trainer asks thousands of times a second.
    """

    def __init__(self) -> None:
        self._version: WeightVersion | None = None
        self._passed = 0
        """Tickets that settled first and are young enough for a step from `_version`."""

    def find_stale_tickets_to_drop(
        self, tickets: TicketTable, generation: int, generation_forks: Sequence[GenerationFork]
    ) -> list[DroppedTicket]:
        """Settled tickets to drop, and nothing else, before `generation` trains its next batch.

        `generation_forks` are all generations of the run.
        """
        policy, current = tickets.policy, WeightVersion(generation, tickets.n_formed_batches)
        known_young = self._passed if current == self._version else 0
        if (
            policy.stale_groups == "train_with_correction"
            or known_young == tickets.n_ready_for_batch
        ):
            return []
        limit = policy.max_head_offpolicyness
        found = [
            DroppedTicket(ticket.ref, f"sampled {age} steps ago; the limit is {limit}", "stale")
            for ticket in tickets.list_first_settled(tickets.n_ready_for_batch)[known_young:]
            if (age := _compute_ticket_age_steps(ticket, current, generation_forks)) > limit
        ]
        self._version, self._passed = (None, 0) if found else (current, tickets.n_ready_for_batch)
        return found


def _compute_ticket_age_steps(
    ticket: SealedTicket, current_version: WeightVersion, generation_forks: Sequence[GenerationFork]
) -> int:
    if ticket.oldest_version == NO_VERSION:
        return 0
    return compute_staleness_steps(
        current_version, WeightVersion.unpack(ticket.oldest_version), generation_forks
    )
