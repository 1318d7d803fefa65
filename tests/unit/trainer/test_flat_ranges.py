"""Ranges of flattened tensors as blocks, against PyTorch's own flattening and slicing."""

import itertools

import pytest
import torch

from areal_hpc.trainer.checkpoints.stored_tensors import (
    Box,
    compute_flat_start_and_extent,
    compute_strides,
    intersect_boxes,
    split_flat_range,
)


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
            assert compute_flat_start_and_extent(shape, box) == (
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
        first, count = compute_flat_start_and_extent(shape, common)
        flat = torch.arange(20)[first : first + count]
        seen = flat.as_strided(common.sizes, compute_strides(shape))
        assert torch.equal(seen, torch.arange(20).view(shape)[common.slices])
