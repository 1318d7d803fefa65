"""Dropped tickets, or rows of them, and why: `dropped_tickets.jsonl`, one object a line."""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_hpc.rundir.jsonl import append_line, read_lines
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.ledger import DropRequest, TicketRef

DropKind = Literal["failed", "filtered", "stale", "requeued"]


class DroppedTicket(msgspec.Struct, frozen=True):
    """A decision that nothing revokes."""

    ref: TicketRef
    reason: str
    kind: DropKind = "failed"
    """`failed`, `filtered`, `stale`: the ticket will not be trained; `requeued`: the rows of this
    attempt will not, and the ticket is issued again."""
    rewards: list[float] = []
    """Of the episodes of a `filtered` group."""

    @classmethod
    def asked(cls, request: DropRequest) -> DroppedTicket:
        """What a driver asks for."""
        return cls(request.ref, request.reason, request.kind, request.rewards)


def append_drop(paths: RunPaths, drop: DroppedTicket) -> None:
    """Make a drop durable. Repeating it is harmless: the first line of a ticket counts.

    Raises:
        OSError: The file system refused.
    """
    append_line(paths.drops, drop, sync=True)


def read_drops(paths: RunPaths) -> list[DroppedTicket]:
    """Every drop in order."""
    return read_lines(paths.drops, DroppedTicket)
