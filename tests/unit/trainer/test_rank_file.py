"""A rank's file: written from shared memory, read in parts, every damage noticed."""

import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from areal_hpc.errors import ShardError
from areal_hpc.rundir.checkpoint_index import DIGEST_BLOCK_BYTES, DIGEST_BYTES
from areal_hpc.trainer.checkpoints.stored_tensors import RankFileReader
from areal_hpc.trainer.checkpoints.writer_process import write_rank_file
from tests.support.counted_reads import counted_reads

SIZE = 3 * DIGEST_BLOCK_BYTES + 1234
CONTENT = random.Random(3).randbytes(SIZE)


def write(path: Path, content: bytes = CONTENT) -> Path:
    memory = os.memfd_create("test")
    try:
        os.write(memory, content + b"of an earlier, larger copy")
        write_rank_file(memory, path, len(content))
    finally:
        os.close(memory)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "rank_00000.bin")


def test_any_part_can_be_read(file: Path) -> None:
    chance = random.Random(4)
    edges = [
        0,
        1,
        DIGEST_BLOCK_BYTES - 1,
        DIGEST_BLOCK_BYTES,
        DIGEST_BLOCK_BYTES + 1,
        3 * DIGEST_BLOCK_BYTES,
        SIZE - 1,
        SIZE,
    ]
    with closing(RankFileReader(file, SIZE)) as reader:
        for _ in range(200):
            start, stop = sorted(chance.sample([*edges, *chance.sample(range(SIZE), 8)], 2))
            assert reader.read(start, stop - start) == CONTENT[start:stop]


def test_what_is_read_in_order_is_read_once(file: Path) -> None:
    with counted_reads() as sizes, closing(RankFileReader(file, SIZE)) as reader:
        step = DIGEST_BLOCK_BYTES // 3 + 7
        parts = [reader.read(at, min(step, SIZE - at)) for at in range(0, SIZE, step)]
    assert b"".join(parts) == CONTENT
    assert sum(sizes) == file.stat().st_size


def test_a_file_of_nothing_is_a_file(tmp_path: Path) -> None:
    assert write(tmp_path / "rank_00001.bin", b"").stat().st_size == 0
    RankFileReader(tmp_path / "rank_00001.bin", 0).close()


@pytest.mark.parametrize(
    "place", [0, DIGEST_BLOCK_BYTES, SIZE - 1, SIZE, SIZE + 4 * DIGEST_BYTES - 1]
)
def test_a_bit_that_flipped_is_noticed_where_it_is_read(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with closing(RankFileReader(file, SIZE)) as reader:
        with pytest.raises(ShardError, match="crc32"):
            reader.read(0, SIZE)
        # Of the second block and the third only the second is changed, by one case.
        if place != DIGEST_BLOCK_BYTES:
            assert (
                reader.read(DIGEST_BLOCK_BYTES, 10)
                == CONTENT[DIGEST_BLOCK_BYTES : DIGEST_BLOCK_BYTES + 10]
            )


@pytest.mark.parametrize("size", [SIZE, SIZE // 2, 0, SIZE + 100])
def test_a_file_of_another_size_is_refused(file: Path, size: int) -> None:
    os.truncate(file, size)
    with pytest.raises(ShardError, match=f"has {size} bytes"):
        RankFileReader(file, SIZE)
