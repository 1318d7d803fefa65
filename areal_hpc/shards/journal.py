"""Node-local journal: records that a process must not lose if it dies before the next seal.

A file of records, each one `write()`:

| field   | bytes  | meaning                                   |
|---------|--------|-------------------------------------------|
| magic   | 4      | `AHJ1`                                    |
| kind    | 4      | the caller's own numbering                |
| length  | 4      | bytes of payload                          |
| crc     | 4      | CRC-32 of kind, length and payload        |
| payload | length | bytes that the journal does not interpret |

Integers are little-endian. A record is safe from the death of the process when `append`
returns, and from the death of the node one sync interval later. Bytes after the last
whole record are the trace of a crash.
"""

import fcntl
import logging
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.files import fsync_path, write_all
from areal_hpc.wire.fault_points import fault_point

_MAGIC = b"AHJ1"
_HEADER_STRUCT = struct.Struct("<4sIII")
_CRC_FIELDS_STRUCT = struct.Struct("<II")
_MAX_PAYLOAD_BYTES = 1 << 30
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JournalRecord:
    kind: int
    payload: bytes

    @property
    def size_bytes(self) -> int:
        return _HEADER_STRUCT.size + len(self.payload)


def encode_record_header(record_kind: int, payload: bytes) -> bytes:
    """Return the header that precedes the payload; ValueError if either is too large."""
    if not 0 <= record_kind < 1 << 32 or len(payload) > _MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a record has a kind of 32 bits and at most {_MAX_PAYLOAD_BYTES} bytes, "
            f"got kind {record_kind} and {len(payload)} bytes"
        )
    crc = zlib.crc32(payload, zlib.crc32(_CRC_FIELDS_STRUCT.pack(record_kind, len(payload))))
    return _HEADER_STRUCT.pack(_MAGIC, record_kind, len(payload), crc)


def read_journal(path: Path) -> Iterator[JournalRecord]:
    """Yield the journal's whole records in order, up to a torn tail."""
    with path.open("rb") as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if not size_bytes:
            return
        offset = 0
        with mmap.mmap(stream.fileno(), size_bytes, access=mmap.ACCESS_READ) as mapped:
            while (record := _read_record_at(mapped, offset)) is not None:
                yield record
                offset += record.size_bytes


def _read_record_at(data: mmap.mmap, offset: int) -> JournalRecord | None:
    begin = offset + _HEADER_STRUCT.size
    if begin > len(data):
        return None
    magic, kind, length, crc = _HEADER_STRUCT.unpack_from(data, offset)
    if magic != _MAGIC or length > _MAX_PAYLOAD_BYTES or begin + length > len(data):
        return None
    payload = data[begin : begin + length]
    if zlib.crc32(payload, zlib.crc32(_CRC_FIELDS_STRUCT.pack(kind, length))) != crc:
        return None
    return JournalRecord(kind, payload)


class JournalWriter:
    """Writer that appends records from any thread; a background thread makes them durable.

    Opening an existing journal cuts off a torn tail. The file has mode 0600 and belongs to one
    process at a time.

    Raises:
        ClusterError: Another process holds the journal; in every method: the disk refuses a write.
    """

    def __init__(self, path: Path, sync_interval_s: float) -> None:
        self.path = path
        self._sync_interval_s = sync_interval_s
        self._appending = threading.Lock()
        # Keeps `compact` from closing the descriptor during a sync. Taken before `_appending`.
        self._syncing = threading.Lock()
        self._dirty = threading.Event()
        self._stop = threading.Event()
        self._sync_error: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _open_journal(path)
            self._size_bytes = _cut_torn_tail(self._descriptor, path)
            fsync_path(path.parent)
        except OSError as error:
            raise _build_disk_error(path, error) from error
        self._thread = threading.Thread(target=self._sync_loop, name="journal-sync", daemon=True)
        self._thread.start()

    @property
    def journal_size_bytes(self) -> int:
        return self._size_bytes

    def append(self, record_kind: int, payload: bytes) -> None:
        """Write one record; on return it survives the death of this process.

        If the disk refuses a write, now or at an earlier sync, the journal stays whole.
        """
        record = encode_record_header(record_kind, payload) + payload
        with self._appending:
            if self._sync_error is not None:
                raise _build_disk_error(self.path, self._sync_error) from self._sync_error
            fault_point("journal.before_append")
            try:
                written_bytes = os.write(self._descriptor, record)
                if written_bytes < len(record):
                    write_all(self._descriptor, (memoryview(record)[written_bytes:],))
            except OSError as error:
                os.ftruncate(self._descriptor, self._size_bytes)
                raise _build_disk_error(self.path, error) from error
            self._size_bytes += len(record)
        if not self._dirty.is_set():  # setting takes a lock that the syncing thread waits for
            self._dirty.set()

    def sync(self) -> None:
        """Make every record appended so far survive the death of the node."""
        try:
            with self._syncing:
                os.fdatasync(self._descriptor)
        except OSError as error:
            raise _build_disk_error(self.path, error) from error

    def compact(self, is_needed: Callable[[JournalRecord], bool]) -> None:
        """Replace the journal by one that holds only the records that are still needed.

        Other threads may append meanwhile; their records are kept. A crash, or a disk that refuses
        a write, leaves either the old journal or the new one, whole.
        """
        fresh_path = self.path.with_name(self.path.name + ".new")
        fresh = -1
        try:
            fresh_path.unlink(missing_ok=True)
            fresh = _open_journal(fresh_path)
            sifted_bytes = self._copy_needed_records(fresh, is_needed)
            os.fdatasync(fresh)
            with self._syncing, self._appending:
                _copy_from_offset(self._descriptor, sifted_bytes, fresh)
                os.fdatasync(fresh)
                size_bytes = os.fstat(fresh).st_size
                fresh_path.rename(self.path)
                # From here on the old file has no name: records written to it would be lost.
                self._descriptor, fresh = fresh, self._descriptor
                self._size_bytes = size_bytes
            fsync_path(self.path.parent)
        except OSError as error:
            raise _build_disk_error(self.path, error) from error
        finally:
            if fresh >= 0:
                os.close(fresh)

    def close(self) -> None:
        """Sync and close; the file stays. Closing again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._dirty.set()
        self._thread.join()
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def _copy_needed_records(self, target: int, is_needed: Callable[[JournalRecord], bool]) -> int:
        """Copy the needed records to `target`; return how many bytes of this journal were read."""
        read_bytes = 0
        for record in read_journal(self.path):
            if is_needed(record):
                write_all(
                    target, (encode_record_header(record.kind, record.payload), record.payload)
                )
            read_bytes += record.size_bytes
        return read_bytes

    def _sync_loop(self) -> None:
        # `close` sets stop before dirty: a loop that sees this dirty mark also sees the stop.
        while not self._stop.is_set():
            self._dirty.wait()
            self._stop.wait(self._sync_interval_s)
            self._dirty.clear()
            try:
                with self._syncing:
                    os.fdatasync(self._descriptor)
            except OSError as error:
                # After a failed sync the kernel may have dropped the data: never try again.
                self._sync_error = error
                return


def _open_journal(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ClusterError(
            "another process writes this journal",
            key=str(path),
            hint="stop the other process, or give this one a TMPDIR of its own",
        ) from error
    return descriptor


def _cut_torn_tail(descriptor: int, path: Path) -> int:
    """Truncate the file behind its last whole record; return the size in bytes."""
    whole_bytes = sum(record.size_bytes for record in read_journal(path))
    torn_bytes = os.fstat(descriptor).st_size - whole_bytes
    if torn_bytes:
        _LOG.warning("%s: removed an incomplete record of %d bytes at the end", path, torn_bytes)
        os.ftruncate(descriptor, whole_bytes)
    return whole_bytes


def _copy_from_offset(source_fd: int, offset: int, target_fd: int) -> None:
    while block := os.pread(source_fd, 1 << 20, offset):
        write_all(target_fd, (block,))
        offset += len(block)


def _build_disk_error(path: Path, error: OSError) -> ClusterError:
    return ClusterError(
        f"cannot write the journal: {error}",
        key=str(path),
        hint="make room on the node-local disk, or set TMPDIR to another folder",
    )
