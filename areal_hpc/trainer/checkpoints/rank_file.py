"""One rank's file of a checkpoint: its digests as they are taken, and parts of it as they are read."""

import mmap
import os
import zlib
from pathlib import Path

from areal_hpc.rundir.checkpoint_index import FileDigests, build_damage_error, read_digests

BLOCK_BYTES = 4 * 1024**2
"""Numbers are read by whole blocks, each with a digest: what is asked for is a little less."""


def digest_blocks(content: bytes | mmap.mmap, block_bytes: int = BLOCK_BYTES) -> FileDigests:
    """The digests of what a rank's file is to hold."""
    with memoryview(content) as view:
        starts = range(0, view.nbytes, block_bytes)
        return FileDigests(
            block_bytes, [zlib.crc32(view[start : start + block_bytes]) for start in starts]
        )


class RankFileReader:
    """A rank's file of a complete checkpoint. What comes out of it is as it was written.

    Raises:
        FileNotFoundError: It is not there, or its digests are not.
        ShardError: It does not have the size that the index says.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._digests = read_digests(path)
        self._size_bytes = size_bytes
        self._kept_at = 0
        self._kept = bytearray()
        self._file = os.open(path, os.O_RDONLY)
        found = os.fstat(self._file).st_size
        expected = -(-size_bytes // self._digests.block_bytes)
        if found != size_bytes or len(self._digests.crc32s) != expected:
            os.close(self._file)
            raise build_damage_error(path, f"it has {found} bytes, the index says {size_bytes}")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def read(self, offset_bytes: int, count_bytes: int) -> memoryview:
        """Some bytes of the file, whose blocks are compared with their digests.

        The last block is kept: what is asked for next often begins in it.

        Raises:
            OSError: The storage refused.
            ShardError: They are damaged.
        """
        size, stop = self._digests.block_bytes, offset_bytes + count_bytes
        if self._kept_at <= offset_bytes and stop <= self._kept_at + len(self._kept):
            return memoryview(self._kept)[offset_bytes - self._kept_at : stop - self._kept_at]
        first = offset_bytes // size * size
        blocks = bytearray(min(-(-stop // size) * size, self._size_bytes) - first)
        known = len(self._kept) if first == self._kept_at else 0
        blocks[:known] = self._kept[:known]
        self._read_blocks(memoryview(blocks)[known:], first + known)
        last = (first + len(blocks) - 1) // size * size
        self._kept, self._kept_at = blocks[last - first :], last
        return memoryview(blocks)[offset_bytes - first : stop - first]

    def _read_blocks(self, target: memoryview, offset_bytes: int) -> None:
        done = 0
        while done < len(target):
            taken = os.preadv(self._file, [target[done:]], offset_bytes + done)
            if taken == 0:
                raise build_damage_error(self._path, f"it ends at byte {offset_bytes + done}")
            done += taken
        size = self._digests.block_bytes
        for start in range(0, len(target), size):
            number = (offset_bytes + start) // size
            crc32, expected = zlib.crc32(target[start : start + size]), self._digests.crc32s[number]
            if crc32 != expected:
                raise build_damage_error(
                    self._path,
                    f"the {size} bytes from byte {number * size} on have the digest "
                    f"crc32:{crc32:08x}, they were written with crc32:{expected:08x}",
                )
