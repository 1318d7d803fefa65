"""A rank's file: written from memory, read in parts, every damage noticed."""

import itertools
import os
import random
from contextlib import closing
from pathlib import Path

import pytest
import torch

from areal_hpc.errors import ShardError
from areal_hpc.rundir.checkpoints import DIGEST_BLOCK_BYTES, DIGEST_BYTES
from areal_hpc.trainer.checkpoints.stored_tensors import (
    Box,
    RankFileReader,
    compute_flat_extent,
    compute_strides,
    intersect_boxes,
    split_flat_range,
)
from areal_hpc.trainer.checkpoints.writer import write_rank_file
from tests.support.counted_reads import counted_reads

SIZE = 3 * DIGEST_BLOCK_BYTES + 1234
CONTENT = random.Random(3).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank_00000.bin"
    write_rank_file(memoryview(CONTENT), path)
    return path


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


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (1, 6), (6, 1), (2, 3, 4)])
def test_the_blocks_of_every_range_have_its_numbers_in_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = split_flat_range(shape, start, stop)
        found = [number for box in boxes for number in tensor[box.slices].flatten().tolist()]
        assert found == list(range(start, stop))
        assert sum(box.numel for box in boxes) == stop - start
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for box in boxes:
            assert compute_flat_extent(shape, box) == (
                int(tensor[box.slices].min()),
                box.numel,
            )


def test_blocks_intersect_where_slices_do() -> None:
    shape, marks = (4, 5), torch.zeros(4, 5, dtype=torch.int)
    edges = [
        Box((row, column), (rows, columns))
        for row, column in itertools.product(range(4), range(5))
        for rows, columns in itertools.product(range(1, 5 - row), range(1, 6 - column))
    ]
    for one, other in itertools.product(edges[::3], edges[::5]):
        marks.zero_()
        marks[one.slices] += 1
        marks[other.slices] += 1
        common = intersect_boxes(one, other)
        if common is None:
            assert marks.max() < 2
            continue
        assert (marks[common.slices] == 2).all()
        assert int((marks == 2).sum()) == common.numel
        within = common.shift_to_coordinates_within(one)
        assert torch.equal(marks[one.slices][within.slices], marks[common.slices])
        assert within.shift_from_within_to_whole(one) == common
        first, count = compute_flat_extent(shape, common)
        flat = torch.arange(20)[first : first + count]
        seen = flat.as_strided(common.sizes, compute_strides(shape))
        assert torch.equal(seen, torch.arange(20).view(shape)[common.slices])
