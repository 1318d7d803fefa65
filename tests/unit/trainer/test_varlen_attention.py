"""Attention segment by segment against plain attention."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model import attention
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


def attend_as_flash(
    query: Any, key: Any, value: Any, query_starts: Any, key_starts: Any, *sizes: Any,
    scale: float, window_size_left: int | None, window_size_right: int | None,
) -> tuple[torch.Tensor]:  # fmt: skip
    """PyTorch's operator written out: causal, and its window, aligned at each segment's end."""
    assert sizes[2:] == (0.0, True, False), "no dropout, causal"
    assert window_size_right == (None if window_size_left is None else 0)
    copies = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(copies, 1) for part in (key, value))
    attended = []
    for segment in range(len(query_starts) - 1):
        queries = slice(*query_starts[segment : segment + 2].tolist())
        keys = slice(*key_starts[segment : segment + 2].tolist())
        scores = torch.einsum("qhd,khd->hqk", query[queries], key[keys]) * scale
        last = torch.arange(scores.shape[1])[:, None] + scores.shape[2] - scores.shape[1]
        place = torch.arange(scores.shape[2])
        left = scores.shape[2] if window_size_left is None else window_size_left
        sees = (place <= last) & (place >= last - left)
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        attended.append(torch.einsum("hqk,khd->qhd", weights, value[keys]))
    return (torch.cat(attended),)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_flash_kernel_is_asked_for_plain_attention(
    monkeypatch: pytest.MonkeyPatch, cp: int, window: int | None
) -> None:
    monkeypatch.setattr(attention, "can_use_flash", lambda query: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", attend_as_flash)
    lengths = np.array([16, 8, 24])
    parts = [
        torch.randn(48, heads, 8, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    found = attend_over_ranks(plan_varlen_attention, parts, lengths, SCALE, cp, window)
    check_gradients(found, attend_plainly(parts, lengths, SCALE, window), parts)


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
