"""One rank's log-probabilities, and attention segment by segment against plain attention."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model import attention, elementwise, logprobs
from areal_hpc.trainer.model.attention import plan_varlen_attention
from areal_hpc.trainer.model.logprobs import (
    SampleableTokens,
    compute_float32_logits,
    consume_logits_into_token_logprobs,
    consume_logits_measuring_entropy,
)
from tests.support.plain_torch import (
    OperationLog,
    attend_over_ranks,
    attend_plainly,
    check_gradients,
)

ROWS, VOCAB, COLUMNS = 7, 11, 16
"""Five columns are padding."""
BFLOAT16_ERROR = 2**-8
"""Relative error of rounding a number."""


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in its stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=[1, 40, 1 << 18])
def chunk_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of one row, a few rows, or all rows."""
    monkeypatch.setitem(elementwise.CHUNK_ELEMENTS_BY_DEVICE, "cpu", request.param)
    return int(request.param)


def draw_sampleable_tokens(
    generator: torch.Generator, labels: torch.Tensor, forbids: bool
) -> tuple[SampleableTokens, torch.Tensor]:
    """Draw the ids that each row lists, and the mask of tokens that it keeps; with `forbids`, every
    second row lists the others."""
    is_kept = torch.rand(ROWS, VOCAB, generator=generator) < 0.4
    is_kept[torch.arange(ROWS), labels] = True
    is_kept[3] = True  # all of them, recorded as none
    forbids_N = (torch.arange(ROWS) % 2 == 0) & forbids
    is_listed = is_kept ^ forbids_N[:, None]
    listed = [[] if row == 3 else is_listed[row].nonzero()[:, 0].tolist() for row in range(ROWS)]
    counts = torch.tensor([len(row_ids) for row_ids in listed])
    starts = [0, *counts.cumsum(0).tolist()]
    ids = torch.tensor([token for row_ids in listed for token in row_ids])
    rows = torch.arange(ROWS).repeat_interleave(counts)
    return SampleableTokens(ids, rows, starts, forbids_N), is_kept


@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, 0.5), (0.0, 1.0)], ids=str)
@pytest.mark.parametrize("sampleable", ["all", "kept", "not forbidden"])
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("chunk_values")
def test_values_and_gradients_are_those_of_a_log_softmax_in_float64(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    tempered: bool,
    sampleable: str,
    weights: tuple[float, float],
) -> None:
    """Log-probabilities and entropies, each with a weight, over the tokens that could be drawn."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    temperature = torch.rand(ROWS, generator=generator) + 0.5 if tempered else None
    slopes = torch.randn(ROWS, generator=generator)
    kept, is_kept = draw_sampleable_tokens(generator, labels, sampleable == "not forbidden")
    sampled_from = None if sampleable == "all" else kept

    ours = hidden.clone().requires_grad_()
    values, entropy = consume_logits_measuring_entropy(
        ours * 1, labels, temperature, VOCAB, group, sampled_from
    )
    alone = consume_logits_into_token_logprobs(
        hidden.clone(), labels, temperature, VOCAB, group, sampled_from
    )
    assert torch.equal(values, alone), "the entropy changes no bit of what is trained"
    terms = [weight * one for weight, one in zip(weights, (values, entropy), strict=True) if weight]
    (torch.stack(terms).sum(0) * slopes).sum().backward()

    plain = hidden.double().requires_grad_()
    logits = plain[:, :VOCAB] / (1.0 if temperature is None else temperature.double()[:, None])
    if sampleable != "all":
        logits = logits.masked_fill(~is_kept, -torch.inf)
    logprobs = logits.log_softmax(-1)
    expected = logprobs.gather(1, labels[:, None])[:, 0]
    finite = torch.where(logits.isinf(), 0.0, logprobs)
    expected_entropy = -(logprobs.exp() * finite).sum(-1)
    ((weights[0] * expected + weights[1] * expected_entropy) * slopes).sum().backward()

    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-6)
    assert ours.grad is not None
    assert plain.grad is not None
    assert ours.grad.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else BFLOAT16_ERROR
    torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=rtol, atol=1e-6)
    assert not ours.grad[:, VOCAB:].any()
    if sampleable != "all":
        assert not ours.grad[:, :VOCAB][~is_kept].any()


def test_the_gradient_takes_the_place_of_the_logits(group: dist.ProcessGroup) -> None:
    leaf = torch.randn(ROWS, COLUMNS, requires_grad=True)
    logits = leaf * 1
    values = consume_logits_into_token_logprobs(
        logits, torch.zeros(ROWS, dtype=torch.long), None, VOCAB, group
    )
    values.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(logits.detach(), leaf.grad)


STATES, HIDDEN, WORDS = 40, 64, 1000
LOGIT_STD = 12.0
MOST_ERROR = 2e-5
"""Error of a log-probability, in nats."""


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(STATES, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(params=[300, 1 << 14], ids=["blocks", "whole"])
def weight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Weight of a head that is taken some columns at a time, or whole."""
    monkeypatch.setattr(logprobs, "VOCAB_BLOCK_COLUMNS", request.param)
    drawn = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(2))
    scaled: torch.Tensor = drawn * (LOGIT_STD / HIDDEN**0.5)
    return scaled.bfloat16()


def measure_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    actual, expected = (scores.double().log_softmax(-1) for scores in (logits, exact))
    return float((actual - expected).abs().max())


def test_log_probabilities_are_those_of_float64(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    exact = hidden.double() @ weight.double().T
    logits = compute_float32_logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert measure_error(logits, exact) <= MOST_ERROR
    rounded = hidden @ weight.T
    assert measure_error(rounded, exact) > 0.05, "what logits in bfloat16 are off by"


def test_gradients_are_as_exact_as_their_inputs(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    slopes = torch.randn(STATES, WORDS, generator=torch.Generator().manual_seed(3))
    hidden.requires_grad_()
    weight.requires_grad_()
    (compute_float32_logits(hidden, weight) * slopes).sum().backward()
    rounded = slopes.bfloat16().double()
    for gradient, expected in (
        (hidden.grad, rounded @ weight.detach().double()),
        (weight.grad, rounded.T @ hidden.detach().double()),
    ):
        assert gradient is not None
        # The remaining error is the rounding of the result to bfloat16, and of sums in float32.
        bound = expected.abs() * BFLOAT16_ERROR + 1e-4
        assert bool(((gradient.double() - expected).abs() <= bound).all())


def test_no_row_is_no_gradient(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    weight.requires_grad_()
    logits = compute_float32_logits(hidden[:0], weight)
    logits.sum().backward()
    assert logits.shape == (0, WORDS)
    assert weight.grad is not None
    assert not weight.grad.any()


CPU = torch.device("cpu")
HEADS, KV_HEADS, SCALE = 4, 2, 0.3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_packed_attention_is_plain_attention_on_any_ranks(units: list[int], cp: int) -> None:
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
        assert plan.key_indices is not None
        # Each rank copies its sequences once, and one chunk of each a second time.
        assert len(plan.key_indices) == lengths.sum() + lengths.sum() // (2 * cp)
        assert plan.query_starts.dtype == plan.key_starts.dtype == torch.int32


def attend_as_flash(
    query: Any, key: Any, value: Any, query_starts: Any, key_starts: Any, *sizes: Any,
    scale: float, window_size_left: int | None, window_size_right: int | None,
) -> tuple[torch.Tensor]:  # fmt: skip
    """Compute PyTorch's operator: causal, its window aligned at each segment's end."""
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
        position = torch.arange(scores.shape[2])
        left = scores.shape[2] if window_size_left is None else window_size_left
        sees = (position <= last) & (position >= last - left)
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
    output = attend_over_ranks(plan_varlen_attention, parts, lengths, SCALE, cp, window)
    check_gradients(output, attend_plainly(parts, lengths, SCALE, window), parts)


def test_the_call_of_the_flash_kernel_is_one_that_pytorch_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors without data check signature, shapes, grouped heads and the gradient's formula."""
    monkeypatch.setattr(attention, "can_use_flash", lambda query: True)
    meta, lengths = torch.device("meta"), np.array([8, 16])
    plan = plan_varlen_attention(lengths, cp=2, cp_rank=0, device=meta)
    parts = [
        torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device=meta, requires_grad=True)
        for tokens, heads in (
            (sum(plan.query_lengths), HEADS),
            (lengths.sum(), KV_HEADS),
            (lengths.sum(), KV_HEADS),
        )
    ]
    query, key, value = parts
    with OperationLog() as log:
        attended = plan.attend(query, key, value, SCALE)
        gradients = torch.autograd.grad(attended.sum(), parts)
    assert attended.shape == parts[0].shape
    assert [gradient.shape for gradient in gradients] == [part.shape for part in parts]
    assert "flash_attention_forward" in log.names
    assert "flash_attention_backward" in log.names
    assert log.reads == []
