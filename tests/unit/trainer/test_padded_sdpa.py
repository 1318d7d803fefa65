import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.trainer.batch.packing import get_zigzag_positions
from areal_hpc.trainer.model.cpu.padded_sdpa import (
    MIN_LENGTH_RATIO,
    gather_from_slots,
    group_by_similar_length,
    plan_padded_sdpa,
    scatter_to_slots,
)

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(np.array)


@given(LENGTHS)
def test_sequences_of_one_rectangle_are_of_similar_length(lengths: np.ndarray) -> None:
    groups = group_by_similar_length(lengths)
    assert sorted(np.concatenate(groups)) == list(range(len(lengths)))
    for group in groups:
        assert lengths[group].min() >= MIN_LENGTH_RATIO * lengths[group].max()


@given(LENGTHS)
def test_tokens_come_back_from_the_rectangles_unchanged(lengths: np.ndarray) -> None:
    slots = plan_padded_sdpa(lengths, cp=1, cp_rank=0, device=CPU).queries
    tokens = torch.randn(lengths.sum(), 3, dtype=torch.float64, requires_grad=True)
    back = gather_from_slots(scatter_to_slots(tokens, slots), slots)
    assert torch.equal(back, tokens)
    back.mul(torch.arange(len(tokens))[:, None]).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad[:, 0].tolist() == list(range(len(tokens)))


def test_equal_lengths_are_not_moved_at_all() -> None:
    assert plan_padded_sdpa(np.array([5, 5, 5]), cp=1, cp_rank=0, device=CPU).queries is None


@pytest.mark.parametrize("cp", [2, 4])
def test_a_query_sees_its_own_past_under_context_parallelism(cp: int) -> None:
    lengths = np.array([4 * cp, 2 * cp])
    for rank in range(cp):
        held = [get_zigzag_positions(int(length), cp, rank) for length in lengths]
        plan = plan_padded_sdpa(lengths, cp=cp, cp_rank=rank, device=CPU)
        for box, positions in zip(plan.padded_groups, held, strict=True):
            assert box.mask is not None
            assert box.mask[0, 0].sum(-1).tolist() == [position + 1 for position in positions]
