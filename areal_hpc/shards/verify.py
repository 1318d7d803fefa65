"""Checks of sealed shards against their index lines, byte for byte; repair after a crash."""

import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from areal_hpc.errors import Problem, ShardError
from areal_hpc.rundir.files import open_regular_file
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import (
    IndexFollower,
    SealedShard,
    append_to_index,
    group_training_rows_by_ticket,
    group_untrained_rows_by_session,
    read_index,
)
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.schema import PARTIAL_SUFFIX, SHARD_SUFFIX, parse_shard_name
from areal_hpc.shards.writer import format_digest
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow

log = logging.getLogger(__name__)

_MAX_BLOCK_BYTES = 1 << 24
"""Bytes per read: many, as each system call waits for the interpreter lock of busy threads."""
MAX_PARALLEL_READS = 4
"""Shards checked at a time: shared storage gives one reader only a part of its bandwidth."""

ProgressCallback = Callable[[int, int], None]
"""Callback that takes the bytes checked so far and the bytes in total."""


@dataclass(slots=True)
class VerifyReport:
    """Result of `verify_run`: counts of what was read, and every problem."""

    shards: int = 0
    rows: int = 0
    problems: list[Problem] = field(default_factory=list)


def verify_run(
    paths: RunPaths, report_progress: ProgressCallback = lambda done, total: None
) -> VerifyReport:
    """Check every index line against its file, and every file against the index.

    Every flipped byte of a shard is detected: a CRC-32 over the whole file detects every error
    burst of up to 32 bits with certainty, and all other damage except for one case in 4 billion.
    """
    # Files first: a shard sealed in between is then in the index, and not reported as an orphan.
    files = _list_shard_files(paths.shards_dir)
    shards = read_index(paths.shard_index_dir)
    report = VerifyReport(len(shards), sum(shard.rows for shard in shards))
    shard_paths = [paths.shards_dir / shard.file for shard in shards]
    done_bytes, total_bytes = 0, sum(shard.bytes for shard in shards)
    with ThreadPoolExecutor(MAX_PARALLEL_READS) as pool:
        # Reading and CRC release the interpreter lock.
        checked = pool.map(list_shard_problems, shard_paths, shards)
        for path, shard, complaints in zip(shard_paths, shards, checked, strict=True):
            report.problems += [
                Problem(complaint, str(path), hint="restore the file from a copy")
                for complaint in complaints
            ]
            done_bytes += shard.bytes
            report_progress(done_bytes, total_bytes)
    known = {shard.file for shard in shards}
    report.problems += [
        Problem(
            "shard without an index line: its writer died after sealing",
            str(path),
            hint="start the run again: the proxies will index it",
        )
        for path in files
        if path.name not in known
    ]
    return report


def find_file_fault(path: Path, expected_bytes: int, expected_digest: str) -> str:
    """Compare a file with the size and digest in its index line; return the difference or ''."""
    try:
        size_bytes, digest = measure_file(path)
    except FileNotFoundError:
        return "the file is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size_bytes != expected_bytes:
        return f"size: expected {expected_bytes} bytes, got {size_bytes}"
    if digest != expected_digest:
        return f"digest: expected {expected_digest}, got {digest}: bytes have changed"
    return ""


def list_shard_problems(path: Path, shard: SealedShard) -> list[str]:
    """List all differences between the file and its index line; empty if it is sound."""
    if fault := find_file_fault(path, shard.bytes, shard.digest):
        return [fault]
    try:
        actual = _build_line_with_digest(path, shard.bytes, shard.digest)
    except ShardError as error:
        return [error.problems[0].message]
    return [
        f"{name}: the index says {getattr(shard, name)}, the file {getattr(actual, name)}"
        for name in ("rows", "tokens", "tickets", "untrained")
        if getattr(shard, name) != getattr(actual, name)
    ]


def measure_file(path: Path) -> tuple[int, str]:
    """Read a whole regular file once; return its size in bytes and its digest."""
    size_bytes = crc = 0
    with open_regular_file(path) as descriptor:
        expected_bytes = os.fstat(descriptor).st_size
        block_bytes = min(_MAX_BLOCK_BYTES, expected_bytes)
        block = memoryview(np.empty(block_bytes, np.uint8))  # type: ignore[arg-type]
        if expected_bytes > block_bytes:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while size_bytes < expected_bytes and (count := os.readv(descriptor, [block])):
            crc = zlib.crc32(block[:count], crc)
            size_bytes += count
    return size_bytes, format_digest(crc)


def build_index_line(path: Path) -> SealedShard:
    """Build the index line of a whole shard."""
    try:
        size_bytes, digest = measure_file(path)
    except OSError as error:
        raise ShardError(f"cannot be read: {error.strerror}", key=str(path)) from error
    return _build_line_with_digest(path, size_bytes, digest)


def _build_line_with_digest(path: Path, size_bytes: int, digest: str) -> SealedShard:
    reader = ShardReader(path)
    records = list(reader.read_records())
    rewards = [
        float(stored) if record.reward is None else record.reward
        for record, stored in zip(records, reader.read_column("reward"), strict=True)
    ]
    return SealedShard(
        file=path.name,
        bytes=size_bytes,
        digest=digest,
        rows=reader.num_rows,
        tokens=reader.num_tokens,
        tickets=group_training_rows_by_ticket(
            reader.read_column("kind"),
            reader.read_column("ticket_id"),
            reader.read_column("attempt"),
            rewards,
            np.split(reader.read_column("versions"), reader.read_column("offsets")[1:-1]),
        ),
        untrained=group_untrained_rows_by_session(reader.list_kinds(), records),
    )


def repair_index(paths: RunPaths, writer: str | None = None) -> None:
    """Index whole shards that a crash left without a line, and remove incomplete ones.

    Call it only while the writers concerned are not running: for one `writer` by its own next
    incarnation, for all writers when the run has stopped. A second repair changes nothing.
    """
    known = {shard.file for shard in read_index(paths.shard_index_dir, writer)}
    for path in _list_shard_files(paths.shards_dir, writer):
        if path.name in known:
            continue
        try:
            append_to_index(paths.shard_index_dir, build_index_line(path))
        except ShardError as error:
            log.warning("left without an index line: %s", error)
    for path in _list_shard_files(paths.shards_dir, writer, PARTIAL_SUFFIX):
        path.unlink()


def _list_shard_files(
    shards_dir: Path, writer: str | None = None, suffix: str = SHARD_SUFFIX
) -> list[Path]:
    if not shards_dir.is_dir():
        return []
    return [
        path
        for path in sorted(shards_dir.iterdir())
        if path.name.endswith(suffix)
        and (named := parse_shard_name(path.name))
        and writer in (None, named[0])
    ]


_RESTORE_HINT = "restore the file from a copy; areal-hpc shards verify names all that are damaged"


class CheckedShards:
    """Sealed shards of a run, read only if their bytes match the digest in the index.

    HDF5 opens no file before its digest is checked: one wrong bit can make it loop forever.
    Not thread-safe.
    """

    def __init__(self, shards_dir: Path, index_dir: Path) -> None:
        self._shards_dir = shards_dir
        self._index = IndexFollower(index_dir)
        self._checked: set[str] = set()
        """Shards that the last check found whole."""
        self._checks: dict[str, Future[None]] = {}
        """Checks that are running, by shard."""

    @contextmanager
    def check_digests_in_background(self, names: Collection[str]) -> Iterator[None]:
        """Check these shards while the block works on their rows; the block's end waits for it.

        Shards that the last call found whole are not read again: neighboring batches share some.
        """
        self._checked &= set(names)
        lines = [self._find_index_line(name) for name in names if name not in self._checked]
        # Reading and CRC release the interpreter lock: on free cores the check costs no time.
        with ThreadPoolExecutor(MAX_PARALLEL_READS) as pool:
            self._checks = {line.file: pool.submit(self._check_shard, line) for line in lines}
            try:
                yield
            finally:
                checks, self._checks = self._checks, {}
                for check in checks.values():
                    check.result()

    def read_training_rows(self, shard_name: str, rows: Sequence[int]) -> list[TrajectoryRow]:
        """Read the training rows with these numbers from a shard, in that order.

        Raises:
            ShardError: The file is missing or damaged, has no such row, or one of another kind.
        """
        path = self._shards_dir / shard_name
        if check := self._checks.get(shard_name):
            check.result()
        try:
            trajectories = ShardReader(path).read_rows(rows, with_messages=False)
        except IndexError as error:
            raise ShardError(str(error), key=str(path), hint=_RESTORE_HINT) from error
        for number, row in zip(rows, trajectories, strict=True):
            if row.kind is not RowKind.TRAIN:
                raise ShardError(
                    f"row {number}: expected a training row, got kind {row.kind.label}",
                    key=str(path),
                    hint="restore manifests/ and shards/ from the same copy",
                )
        return trajectories

    def _check_shard(self, line: SealedShard) -> None:
        path = self._shards_dir / line.file
        if fault := find_file_fault(path, line.bytes, line.digest):
            raise ShardError(fault, key=str(path), hint=_RESTORE_HINT)
        self._checked.add(line.file)

    def _find_index_line(self, shard_name: str) -> SealedShard:
        path = self._shards_dir / shard_name
        try:
            line = self._index.find(shard_name)
        except OSError as error:
            raise ShardError(f"its index cannot be read: {error}", key=str(path)) from error
        if line is None:
            raise ShardError(
                "the index has no line of this shard",
                key=str(path),
                hint="restore the file index/ of its writer from a copy",
            )
        return line
