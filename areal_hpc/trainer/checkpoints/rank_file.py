"""One rank's file of a checkpoint, whose parts are as they were written, or an error."""

import os
import zlib
from pathlib import Path

import numpy as np

from areal_hpc.errors import ShardError
from areal_hpc.rundir.checkpoint_index import (
    DIGEST_BLOCK_BYTES,
    DIGEST_BYTES,
    build_checkpoint_damage_error,
    count_digest_blocks,
)


class RankFileReader:
    """A rank's file of a complete checkpoint.

    Raises:
        FileNotFoundError: It is not there.
        ShardError: It does not have the size that the index says.
    """

    def __init__(self, path: Path, data_bytes: int) -> None:
        self._path = path
        self._data_bytes = data_bytes
        self._kept_at = 0
        self._kept = bytearray()
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._check_file_size()
            digests = bytearray(count_digest_blocks(data_bytes) * DIGEST_BYTES)
            self._read_bytes(memoryview(digests), data_bytes)
        except (OSError, ShardError):
            os.close(self._file)
            raise
        self._digests = np.frombuffer(digests, "<u4")

    def _check_file_size(self) -> None:
        found = os.fstat(self._file).st_size
        expected = self._data_bytes + count_digest_blocks(self._data_bytes) * DIGEST_BYTES
        if found != expected:
            raise build_checkpoint_damage_error(
                self._path, f"the file has {found} bytes, by the index it has {expected}"
            )

    def close(self) -> None:
        os.close(self._file)

    def read(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Some bytes of the columns, whose blocks are compared with their digests.

        The last block is kept: what is asked for next often begins in it.
        """
        stop = offset_bytes + size_bytes
        first = offset_bytes // DIGEST_BLOCK_BYTES * DIGEST_BLOCK_BYTES
        blocks = bytearray(
            min(count_digest_blocks(stop) * DIGEST_BLOCK_BYTES, self._data_bytes) - first
        )
        known = len(self._kept) if first == self._kept_at else 0
        if known >= len(blocks):
            return memoryview(self._kept)[offset_bytes - first : stop - first]
        blocks[:known] = self._kept[:known]
        self._read_and_verify_blocks(memoryview(blocks)[known:], first + known)
        self._kept_at = (stop - 1) // DIGEST_BLOCK_BYTES * DIGEST_BLOCK_BYTES
        self._kept = blocks[self._kept_at - first :]
        return memoryview(blocks)[offset_bytes - first : stop - first]

    def _read_and_verify_blocks(self, target: memoryview, offset_bytes: int) -> None:
        self._read_bytes(target, offset_bytes)
        for start in range(0, len(target), DIGEST_BLOCK_BYTES):
            block = target[start : start + DIGEST_BLOCK_BYTES]
            found = zlib.crc32(block)
            expected = int(self._digests[(offset_bytes + start) // DIGEST_BLOCK_BYTES])
            if found != expected:
                raise build_checkpoint_damage_error(
                    self._path,
                    f"the {len(block)} bytes from byte {offset_bytes + start} on have the digest "
                    f"crc32:{found:08x}, they were written with crc32:{expected:08x}",
                )

    def _read_bytes(self, target: memoryview, offset_bytes: int) -> None:
        done = 0
        while done < len(target):
            taken = os.preadv(self._file, [target[done:]], offset_bytes + done)
            if taken == 0:
                raise build_checkpoint_damage_error(
                    self._path, f"it ends at byte {offset_bytes + done}"
                )
            done += taken
