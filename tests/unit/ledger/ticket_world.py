"""What is real apart from the ledger: cells that work, and a disk that survives."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_hpc.ledger.admission import TicketPolicy
from areal_hpc.rundir.checkpoints import TrainerState
from areal_hpc.rundir.drops import DroppedTicket
from areal_hpc.shards.index import SealedShard, ShardTicket
from areal_hpc.view.audit.records import TicketRecords
from areal_hpc.view.audit.ticket_status import AuditReport, classify_tickets
from areal_hpc.wire.ledger import BatchManifest, SettledTicket, TicketRef


@dataclass
class Cell:
    """What a cell really holds."""

    name: str
    held: list[TicketRef] = field(default_factory=list)
    finished: list[TicketRef] = field(default_factory=list)
    undelivered: list[SettledTicket] = field(default_factory=list)


@dataclass
class Disk:
    """Everything that survives a crash of the ledger or the trainer."""

    manifests: list[BatchManifest] = field(default_factory=list)
    drops: list[DroppedTicket] = field(default_factory=list)
    index: list[SettledTicket] = field(default_factory=list)
    incarnation: int = 1
    version_step: int = 0
    checkpoint_step: int = 0

    def audited(self, policy: TicketPolicy, *, is_finished: bool = False) -> AuditReport:
        """What `areal-hpc audit` would say: it sees the disk alone."""
        files = sorted({ticket.shard for ticket in self.index})
        rows = {file: [one for one in self.index if one.shard == file] for file in files}
        shards = [
            SealedShard(
                file,
                bytes=100,
                digest="",
                rows=len(rows[file]),
                tokens=0,
                tickets=[
                    ShardTicket(
                        one.ref.ticket_id,
                        one.ref.attempt,
                        one.rows,
                        one.rewards,
                        one.oldest_version,
                    )
                    for one in rows[file]
                ],
            )
            for file in files
        ]
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
                requeued={(one.ticket_id, one.attempt) for one in self.requeued},
                shards=shards,
                file_bytes=dict.fromkeys(files, 100),
                is_finished=is_finished,
                total_steps=policy.total_steps,
                batch_size=policy.batch_size,
                max_head_offpolicyness=policy.max_head_offpolicyness,
            )
        )

    def given_up(self, *kinds: str) -> dict[int, str]:
        return {drop.ref.ticket_id: drop.reason for drop in self.drops if drop.kind in kinds}

    @property
    def requeued(self) -> set[TicketRef]:
        return {drop.ref for drop in self.drops if drop.kind == "requeued"}
