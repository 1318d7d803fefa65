"""Tickets, or their rows, that will not be trained, and why: `drops.jsonl`, one object a line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

import msgspec

from areal_hpc.layout import RunLayout
from areal_hpc.shards.index import sync_directory
from areal_hpc.wire.ledger import DropRequest, TicketRef

DropKind = Literal["failed", "filtered", "stale", "requeued"]


class Drop(msgspec.Struct, frozen=True):
    """A decision that nothing revokes."""

    ref: TicketRef
    reason: str
    kind: DropKind = "failed"
    """`failed`, `filtered`, `stale`: the ticket will not be trained; `requeued`: the rows of this
    attempt will not, and the ticket is issued again."""

    @classmethod
    def asked(cls, request: DropRequest) -> Drop:
        """What a driver asks for."""
        return cls(request.ref, request.reason, request.kind)


def append_drop(layout: RunLayout, drop: Drop) -> None:
    """Make a drop durable. Repeating it is harmless: the first line of a ticket counts.

    Raises:
        OSError: The file system refused.
    """
    is_new = not layout.drops.exists()
    with layout.drops.open("ab+") as stream:
        # A crash may have left half a line: end it, or it would swallow this one.
        is_torn = stream.tell() > 0 and os.pread(stream.fileno(), 1, stream.tell() - 1) != b"\n"
        stream.write(b"\n" * is_torn + msgspec.json.encode(drop) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    if is_new:
        sync_directory(layout.root)


def read_drops(layout: RunLayout) -> Iterator[Drop]:
    """Every drop in order. Half a line is the trace of a crash: it was never acknowledged."""
    if not layout.drops.exists():
        return
    for line in layout.drops.read_bytes().split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield msgspec.json.decode(line, type=Drop)
