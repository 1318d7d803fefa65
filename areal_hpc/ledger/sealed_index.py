"""Index of the shards as the ledger follows it: a ticket counts only with the rows it has there.

A proxy writes the line first and settles then, so a ticket without one was made up, or lost.
"""

import os
from pathlib import Path

import msgspec

from areal_hpc.shards.index import SealedShard, get_index_path
from areal_hpc.shards.schema import SHARD_SUFFIX, parse_shard_name
from areal_hpc.wire.ledger import SealedTicket


class _ShardName(msgspec.Struct, frozen=True):
    """What must be known of a line to find it again."""

    file: str


class SealedIndex:
    """Where in the index the line of each shard is; lines themselves are read when needed."""

    def __init__(self, index_dir: Path) -> None:
        self._index_dir = index_dir
        self._lines: dict[str, tuple[int, int]] = {}
        """Shard -> the first byte of its line, and its length."""
        self._read_bytes: dict[str, int] = {}
        """By writer, how much of its index is in `_lines`: an index grows as long as its run."""

    def find_fault(self, ticket: SealedTicket) -> str:
        """How the index contradicts a ticket; empty if it confirms it.

        Raises:
            OSError: The index cannot be read.
        """
        named = parse_shard_name(ticket.shard)
        if named is None or not ticket.shard.endswith(SHARD_SUFFIX):
            return "that is not the name of a shard"
        path = get_index_path(self._index_dir, named[0])
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return "its writer has no index"
        try:
            if ticket.shard not in self._lines:
                self._read_new_lines(named[0], descriptor)
            if ticket.shard not in self._lines:
                return "the index has no line of that shard"
            begin, length = self._lines[ticket.shard]
            shard = msgspec.json.decode(os.pread(descriptor, length, begin), type=SealedShard)
        finally:
            os.close(descriptor)
        for one in shard.tickets:
            if (one.ticket_id, one.attempt) == (ticket.ref.ticket_id, ticket.ref.attempt):
                found = (one.rows, one.rewards, one.oldest_version)
                expected = (ticket.rows, ticket.rewards, ticket.oldest_version)
                return "" if found == expected else "the index has other rows or rewards of it"
        return "that shard does not hold it"

    def _read_new_lines(self, writer: str, descriptor: int) -> None:
        begin = self._read_bytes.get(writer, 0)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            stream.seek(begin)
            content = stream.read()
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # still in the writing
            try:
                name = msgspec.json.decode(line, type=_ShardName).file
                self._lines.setdefault(name, (begin, len(line)))
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # the trace of a crash: no shard is sealed by it
            begin += len(line)
        self._read_bytes[writer] = begin
