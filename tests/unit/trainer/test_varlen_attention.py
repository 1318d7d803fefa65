"""Attention segment by segment against plain attention."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model.attention import plan_varlen_attention
from tests.support.plain_torch import (
    OperationLog,
    attend_over_ranks,
    attend_plainly,
    check_gradients,
)

CPU = torch.device("cpu")
HEADS, KV_HEADS, SCALE = 4, 2, 0.3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_packed_attention_is_plain_attention_on_any_number_of_ranks(
    units: list[int], cp: int
) -> None:
    lengths = np.array(units) * (2 * cp if cp > 1 else 1)
    tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(tokens)
    parts = [
        torch.randn(tokens, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    expected = attend_plainly(parts, lengths, SCALE)
    check_gradients(
        attend_over_ranks(plan_varlen_attention, parts, lengths, SCALE, cp), expected, parts
    )


def test_memory_and_work_of_segments_are_those_of_causal_attention() -> None:
    lengths, cp = np.array([64, 32]), 4
    plans = [plan_varlen_attention(lengths, cp=cp, cp_rank=rank, device=CPU) for rank in range(cp)]
    pairs = {
        sum(q * k for q, k in zip(plan.query_lengths, plan.key_lengths, strict=True))
        for plan in plans
    }
    assert len(pairs) == 1, "the zig-zag gives every rank the same work"
    for plan in plans:
        assert plan.key_places is not None
        # Each rank copies its sequences once, and one chunk of each a second time.
        assert len(plan.key_places) == lengths.sum() + lengths.sum() // (2 * cp)
        assert plan.query_starts.dtype == plan.key_starts.dtype == torch.int32


def test_the_call_of_the_flash_kernel_is_one_that_pytorch_accepts() -> None:
    """On tensors without data: signature, shapes, grouped heads and the gradient's formula."""
    meta = torch.device("meta")
    plan = plan_varlen_attention(np.array([8, 16]), cp=2, cp_rank=0, device=meta)
    parts = [
        torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device=meta, requires_grad=True)
        for tokens, heads in (
            (sum(plan.query_lengths), HEADS),
            (sum(plan.key_lengths), KV_HEADS),
            (sum(plan.key_lengths), KV_HEADS),
        )
    ]
    query, key, value = parts
    with OperationLog() as log:
        attended = plan.attend_fused(query, key, value, SCALE)
        gradients = torch.autograd.grad(attended.sum(), parts)
    assert attended.shape == parts[0].shape
    assert [gradient.shape for gradient in gradients] == [part.shape for part in parts]
    assert "flash_attention_forward" in log.names
    assert "flash_attention_backward" in log.names
    assert log.reads == []
