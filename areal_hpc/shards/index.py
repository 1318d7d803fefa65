"""Index of the sealed shards: their tickets, their rows and the digests of their files.

`index/<writer>.jsonl` has one line per sealed shard and is only ever appended to. A shard
counts as sealed when its line is there; the line is written last.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from areal_hpc.rundir.files import make_folder, open_regular_file
from areal_hpc.rundir.jsonl import (
    LineFollower,
    append_line,
    decode_readable_records,
    read_readable_records,
)
from areal_hpc.shards.schema import SHARD_SUFFIX, parse_shard_name
from areal_hpc.wire.decoding import decode_json
from areal_hpc.wire.ledger import SealedTicket, TicketRef
from areal_hpc.wire.trajectory import RowKind, RowRecord

_TAIL_BYTES = 1 << 16
"""Bytes read first from the end of an index: a line of some hundred tickets."""


class ShardTicket(msgspec.Struct, frozen=True):
    """One attempt of a ticket inside one shard."""

    ticket_id: int
    attempt: int
    rows: list[int]
    """Row numbers in the shard."""
    rewards: list[float]
    """Reward of each row, in double precision."""
    oldest_version: int
    """Packed version of the oldest weights that sampled one of its tokens; -1 without any."""


class UntrainedEpisodeRows(msgspec.Struct, frozen=True, omit_defaults=True):
    """One episode inside one shard whose rows are never trained on."""

    kind: str
    """`RowKind.label`."""
    session_id: str
    rows: list[int]
    """Row numbers in the shard."""
    cause: str = ""
    """Exception and line of a failed episode."""


class SealedShard(msgspec.Struct, frozen=True, omit_defaults=True):
    file: str
    """Name in the run's shards directory."""
    bytes: int
    digest: str
    """`crc32:<8 hex digits>` over every byte of the file."""
    rows: int
    tokens: int
    tickets: list[ShardTicket]
    """Tickets of the training rows; batches are formed from these."""
    untrained: list[UntrainedEpisodeRows] = []

    def list_sealed_tickets(self) -> list[SealedTicket]:
        """Return the tickets in the form that the ledger and batch manifests use."""
        sealed = []
        for ticket in self.tickets:
            ref = TicketRef(ticket.ticket_id, ticket.attempt)
            sealed.append(
                SealedTicket(ref, self.file, ticket.rows, ticket.rewards, ticket.oldest_version)
            )
        return sealed


def group_training_rows_by_ticket(
    kinds: npt.NDArray[np.uint8],
    ticket_ids: npt.NDArray[np.int64],
    attempts: npt.NDArray[np.int32],
    rewards: Sequence[float],
    versions: Sequence[npt.NDArray[np.int64]],
) -> list[ShardTicket]:
    """Group training rows by ticket, in order of first row. Arguments have one element per row."""
    rows_of: dict[tuple[int, int], list[int]] = {}
    keys = zip(ticket_ids.tolist(), attempts.tolist(), strict=True)
    for row, (kind, key) in enumerate(zip(kinds.tolist(), keys, strict=True)):
        if kind == RowKind.TRAIN:
            rows_of.setdefault(key, []).append(row)
    return [
        ShardTicket(
            ticket_id,
            attempt,
            rows,
            [rewards[row] for row in rows],
            _find_oldest_version(versions, rows),
        )
        for (ticket_id, attempt), rows in rows_of.items()
    ]


def group_untrained_rows_by_session(
    kinds: Iterable[RowKind], records: Iterable[RowRecord]
) -> list[UntrainedEpisodeRows]:
    """Group other rows by episode, in order of first row. Arguments have one element per row."""
    rows_of: dict[tuple[RowKind, str, str], list[int]] = {}
    for row, (kind, record) in enumerate(zip(kinds, records, strict=True)):
        if kind is not RowKind.TRAIN:
            rows_of.setdefault((kind, record.session_id, record.cause), []).append(row)
    return [
        UntrainedEpisodeRows(kind.label, session_id, rows, cause)
        for (kind, session_id, cause), rows in rows_of.items()
    ]


def _find_oldest_version(versions: Sequence[npt.NDArray[np.int64]], rows: Sequence[int]) -> int:
    versions_T = np.concatenate([versions[row] for row in rows])
    sampled = versions_T[versions_T >= 0]
    return int(sampled.min()) if len(sampled) else -1


def get_index_path(index_dir: Path, writer: str) -> Path:
    return index_dir / f"{writer}.jsonl"


def append_to_index(index_dir: Path, shard: SealedShard) -> None:
    """Add the shard's line durably. The shard is sealed when this returns."""
    named = parse_shard_name(shard.file)
    if named is None:
        raise ValueError(f"{shard.file!r} is not the name of a shard")
    path = get_index_path(index_dir, named[0])
    try:
        append_line(path, shard, sync=True)
    except FileNotFoundError:
        make_folder(index_dir)
        append_line(path, shard, sync=True)


def read_index(index_dir: Path, writer: str | None = None) -> list[SealedShard]:
    """Return every sealed shard of the run (or of one writer), ordered by writer, then by sealing.

    A torn last line is the trace of a crash and is skipped: its shard is an orphan, which
    `verify_run` reports and `repair_index` indexes again.
    """
    if not index_dir.is_dir():
        return []
    paths = [get_index_path(index_dir, writer)] if writer else sorted(index_dir.glob("*.jsonl"))
    return [shard for path in paths for shard in read_readable_records(path, SealedShard)]


def read_sealed_tickets(index_dir: Path) -> Iterator[SealedTicket]:
    """Yield every ticket of every sealed shard, including old batches and later copies."""
    for shard in read_index(index_dir):
        yield from shard.list_sealed_tickets()


class _LineFileName(msgspec.Struct, frozen=True):
    file: str


class IndexFollower:
    """Finder of index lines, which works while the writers go on appending.

    It stores the position of each line, and reads a line on request.
    """

    def __init__(self, index_dir: Path) -> None:
        self._index_dir = index_dir
        self._positions: dict[str, tuple[int, int]] = {}
        """Shard -> first byte and length of its line."""
        self._followers: dict[Path, LineFollower] = {}

    def find(self, shard_name: str) -> SealedShard | None:
        """Return the index line of a shard; None without one, or if the name is no sealed shard's.

        Raises:
            OSError: The index cannot be read.
        """
        named = parse_shard_name(shard_name)
        if named is None or not shard_name.endswith(SHARD_SUFFIX):
            return None
        path = get_index_path(self._index_dir, named[0])
        if shard_name not in self._positions:
            self._note_new_lines(path)
        if shard_name not in self._positions:
            return None
        begin, length = self._positions[shard_name]
        with open_regular_file(path) as descriptor:
            return decode_json(os.pread(descriptor, length, begin), SealedShard)

    def _note_new_lines(self, path: Path) -> None:
        follower = self._followers.setdefault(path, LineFollower(path))
        with suppress(FileNotFoundError):
            content = follower.read_new_lines()
            begin = follower.offset - len(content)
            for line in content.splitlines(keepends=True):
                # An unreadable line is the trace of a crash: it seals no shard.
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    name = decode_json(line, _LineFileName).file
                    self._positions.setdefault(name, (begin, len(line)))
                begin += len(line)


def read_last_shard_number(index_dir: Path, writer: str) -> int:
    """Return the highest number among the writer's last indexed shards; -1 before the first.

    Only the end of the index is read: an index grows as long as its run.
    """
    try:
        stream = get_index_path(index_dir, writer).open("rb", buffering=0)
    except FileNotFoundError:
        return -1
    with stream:
        size_bytes, tail_bytes = os.fstat(stream.fileno()).st_size, _TAIL_BYTES
        while True:
            start = max(0, size_bytes - tail_bytes)
            stream.seek(start)
            tail = stream.read()
            # Unless it starts the file, the tail may begin in the middle of a line.
            lines = decode_readable_records(
                tail if start == 0 else tail[tail.find(b"\n") + 1 :], SealedShard
            )
            sequences = [named[1] for line in lines if (named := parse_shard_name(line.file))]
            if sequences or start == 0:
                return max(sequences, default=-1)
            tail_bytes *= 4


def locate_tickets(shards: Iterable[SealedShard]) -> dict[TicketRef, SealedTicket]:
    """Map each ticket to the shard in which it is sealed.

    A writer that died right after sealing may seal the same tickets again; the first copy counts.
    """
    sealed_tickets: dict[TicketRef, SealedTicket] = {}
    for shard in shards:
        for ticket in shard.list_sealed_tickets():
            sealed_tickets.setdefault(ticket.ref, ticket)
    return sealed_tickets
