"""Shards of a run that are read and checked against their index lines at the same time."""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from areal_hpc.errors import ShardError
from areal_hpc.shards.index import IndexFollower, SealedShard
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.verify import MAX_PARALLEL_READS, find_file_fault
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow

_RESTORE_HINT = "restore the file from a copy; areal-hpc shards verify names all that are damaged"


class CheckedShards:
    """The sealed shards of a run. A file whose bytes are not those that were sealed is refused.

    HDF5 sees no file before its digest is known to be right: one wrong bit can
    make it loop for ever.

    Not safe for threads.
    """

    def __init__(self, shards_dir: Path, index_dir: Path) -> None:
        self._shards_dir = shards_dir
        self._index = IndexFollower(index_dir)
        self._checked: set[str] = set()
        """Shards of the last check that are whole."""
        self._checks: dict[str, Future[None]] = {}
        """Those under way."""

    @contextmanager
    def check_digests_in_background(self, names: Collection[str]) -> Iterator[None]:
        """Check these shards while the block is at work on their rows; the end waits for it.

        Those that the last call found whole are not read again: neighboring batches share some.
        """
        self._checked &= set(names)
        lines = [self._find_index_line(name) for name in names if name not in self._checked]
        # Reading and CRC release the interpreter lock: on cores of its own the check is free.
        with ThreadPoolExecutor(MAX_PARALLEL_READS) as pool:
            self._checks = {line.file: pool.submit(self._check_shard, line) for line in lines}
            try:
                yield
            finally:
                checks, self._checks = self._checks, {}
                for check in checks.values():
                    check.result()

    def read_training_rows(self, shard_name: str, rows: Sequence[int]) -> list[TrajectoryRow]:
        """The training rows at these places of a shard, in that order.

        Raises:
            ShardError: The file is missing or damaged, has no such row, or one of another kind.
        """
        path = self._shards_dir / shard_name
        if check := self._checks.get(shard_name):
            check.result()
        try:
            found = ShardReader(path).read_rows(rows, with_messages=False)
        except IndexError as error:
            raise ShardError(str(error), key=str(path), hint=_RESTORE_HINT) from error
        for number, row in zip(rows, found, strict=True):
            if row.kind is not RowKind.TRAIN:
                raise ShardError(
                    f"row {number}: expected a training row, got kind {row.kind.label}",
                    key=str(path),
                    hint="restore manifests/ and shards/ from the same copy",
                )
        return found

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
