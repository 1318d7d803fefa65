"""Index of the shards as the ledger follows it: a ticket counts only with the rows it has there.

A proxy writes the line first and settles then, so a ticket without one was made up, or lost.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from areal_hpc.rundir.jsonl import LineFollower
from areal_hpc.shards.index import SealedShard, ShardTicket, get_index_path
from areal_hpc.shards.schema import SHARD_SUFFIX, parse_shard_name
from areal_hpc.wire.ledger import SealedTicket


class _IndexLineFileName(msgspec.Struct, frozen=True):
    file: str


class SealedTicketChecker:
    """Where in the index the line of each shard is; a line itself is read when it is needed."""

    def __init__(self, index_dir: Path) -> None:
        self._index_dir = index_dir
        self._lines: dict[str, tuple[int, int]] = {}
        """Shard -> the first byte of its line, and its length."""
        self._indexes: dict[str, LineFollower] = {}
        """By writer; the places of its lines so far are in `_lines`."""
        self._newest_file = ""
        self._newest_tickets: dict[tuple[int, int], ShardTicket] = {}
        """Of the shard that was asked for last, by id and attempt: its tickets settle together."""

    def find_contradiction_with_index(self, ticket: SealedTicket) -> str:
        """How the index contradicts a ticket; empty if it confirms it."""
        if ticket.shard != self._newest_file and (
            fault := self._load_tickets_of_shard_or_find_fault(ticket.shard)
        ):
            return fault
        one = self._newest_tickets.get((ticket.ref.ticket_id, ticket.ref.attempt))
        if one is None:
            return "that shard does not hold it"
        found = (one.rows, one.rewards, one.oldest_version)
        expected = (ticket.rows, ticket.rewards, ticket.oldest_version)
        return "" if found == expected else "the index has other rows or rewards of it"

    def _load_tickets_of_shard_or_find_fault(self, shard: str) -> str:
        named = parse_shard_name(shard)
        if named is None or not shard.endswith(SHARD_SUFFIX):
            return "that is not the name of a shard"
        try:
            path = get_index_path(self._index_dir, named[0])
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return "its writer has no index"
        try:
            if shard not in self._lines:
                self._note_places_of_new_lines(named[0], path)
            if shard not in self._lines:
                return "the index has no line of that shard"
            begin, length = self._lines[shard]
            line = msgspec.json.decode(os.pread(descriptor, length, begin), type=SealedShard)
        finally:
            os.close(descriptor)
        self._newest_tickets = {(one.ticket_id, one.attempt): one for one in line.tickets}
        self._newest_file = shard
        return ""

    def _note_places_of_new_lines(self, writer: str, path: Path) -> None:
        index = self._indexes.setdefault(writer, LineFollower(path))
        begin = index.offset
        for line in index.read_new_lines().splitlines(keepends=True):
            # What cannot be read is the trace of a crash: no shard is sealed by it.
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                name = msgspec.json.decode(line, type=_IndexLineFileName).file
                self._lines.setdefault(name, (begin, len(line)))
            begin += len(line)
