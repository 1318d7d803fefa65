"""World around a ledger: cells that work, and a disk that survives crashes."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from areal_hpc.ledger.tickets import TicketPolicy, TicketTable
from areal_hpc.rundir.checkpoints import TrainerState
from areal_hpc.rundir.manifests import DroppedTicket
from areal_hpc.shards.index import SealedShard, ShardTicket
from areal_hpc.view.audit import AuditReport, TicketRecords, classify_tickets
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.weight_version import WeightVersion

SHARD_BYTES = 100


def settled(ref: TicketRef, version: WeightVersion | None = None) -> SealedTicket:
    oldest = version.packed if version else NO_VERSION
    return SealedTicket(ref, "cell-0-000000.h5", [0], [1.0], oldest)


rebuilt = partial(
    TicketTable.rebuild,
    incarnation=2,
    version_step=0,
    manifests=(),
    dropped=(),
    settled=(),
    grants_from_s=0.0,
)
"""Table of a ledger's second start."""


def form_batch(tickets: TicketTable) -> BatchManifest:
    """Form the next batch, which must be complete."""
    manifest = tickets.build_next_batch(generation=1)
    assert manifest is not None
    tickets.record_batch(manifest)
    return manifest


def fill_batch(tickets: TicketTable) -> BatchManifest:
    """Fill the next batch with settled and fresh tickets."""
    for ref in tickets.lease_tickets(
        "b", tickets.policy.batch_size - tickets.n_ready_for_batch, 0.0
    ):
        tickets.settle(settled(ref, WeightVersion(1, tickets.version_step)))
    return form_batch(tickets)


@dataclass
class Cell:
    """Tickets that a cell really holds."""

    name: str
    held: list[TicketRef] = field(default_factory=list)
    finished: list[TicketRef] = field(default_factory=list)
    undelivered: list[SealedTicket] = field(default_factory=list)

    def finish_all(self) -> None:
        self.finished += self.held
        self.held.clear()


@dataclass
class Disk:
    """Files that survive a crash of the ledger or the trainer."""

    manifests: list[BatchManifest] = field(default_factory=list)
    drops: list[DroppedTicket] = field(default_factory=list)
    index: list[SealedTicket] = field(default_factory=list)
    incarnation: int = 1
    version_step: int = 0
    checkpoint_step: int = 0

    def audited(self, policy: TicketPolicy, *, is_finished: bool = False) -> AuditReport:
        """Return the report of `areal-hpc audit`, which sees the disk alone."""
        tickets: dict[str, list[ShardTicket]] = defaultdict(list)
        for ticket in self.index:
            id_and_attempt = ticket.ref.ticket_id, ticket.ref.attempt
            tickets[ticket.shard].append(
                ShardTicket(*id_and_attempt, ticket.rows, ticket.rewards, ticket.oldest_version)
            )
        return classify_tickets(
            TicketRecords(
                checkpoint=TrainerState(
                    step=self.checkpoint_step,
                    generation=1,
                    seed=1,
                    consumed=[*range(1, self.checkpoint_step + 1)],
                ),
                manifests={manifest.step: manifest for manifest in self.manifests},
                drops=self.given_up("failed", "stale"),
                filtered=self.given_up("filtered"),
                shards=[
                    SealedShard(file, SHARD_BYTES, "", len(held), 0, held)
                    for file, held in sorted(tickets.items())
                ],
                file_bytes=dict.fromkeys(tickets, SHARD_BYTES),
                is_finished=is_finished,
                total_steps=policy.total_steps,
                batch_size=policy.batch_size,
                max_head_offpolicyness=policy.max_head_offpolicyness,
            )
        )

    def given_up(self, *kinds: str) -> dict[int, str]:
        return {drop.ref.ticket_id: drop.reason for drop in self.drops if drop.kind in kinds}
