"""Logits in float32 of numbers in bfloat16, against float64."""

import pytest
import torch

from areal_hpc.trainer.model import logprobs
from areal_hpc.trainer.model.logprobs import compute_float32_logits

ROWS, HIDDEN, VOCAB = 40, 64, 1000
LOGIT_STD = 12.0
MOST_ERROR = 2e-5
"""Of a log-probability, in nats."""
BFLOAT16_ERROR = 2**-8
"""Of rounding a number, as a share of it."""


@pytest.fixture(autouse=True, params=[300, 1 << 14], ids=["blocks", "whole"])
def block_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some columns at a time, or all of them."""
    monkeypatch.setattr(logprobs, "VOCAB_BLOCK_COLUMNS", request.param)


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def weight() -> torch.Tensor:
    drawn = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    scaled: torch.Tensor = drawn * (LOGIT_STD / HIDDEN**0.5)
    return scaled.bfloat16()


def measure_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    found, expected = (one.double().log_softmax(-1) for one in (logits, exact))
    return float((found - expected).abs().max())


@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float32])
def test_log_probabilities_are_those_of_float64(
    hidden: torch.Tensor, weight: torch.Tensor, operands: torch.dtype
) -> None:
    exact = hidden.double() @ weight.double().T
    logits = compute_float32_logits(hidden, weight, operands)
    assert logits.dtype == torch.float32
    assert measure_error(logits, exact) <= MOST_ERROR
    rounded = hidden @ weight.T
    assert measure_error(rounded, exact) > 0.05, "what logits in bfloat16 are off by"


@pytest.mark.parametrize("operands", [torch.bfloat16, torch.float32])
def test_gradients_are_as_exact_as_what_enters_the_products(
    hidden: torch.Tensor, weight: torch.Tensor, operands: torch.dtype
) -> None:
    slopes = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3))
    hidden.requires_grad_()
    weight.requires_grad_()
    (compute_float32_logits(hidden, weight, operands) * slopes).sum().backward()
    rounded = slopes.to(operands).double()
    for found, expected in (
        (hidden.grad, rounded @ weight.detach().double()),
        (weight.grad, rounded.T @ hidden.detach().double()),
    ):
        assert found is not None
        # What is left is the rounding of the result to bfloat16, and of sums in float32.
        bound = expected.abs() * BFLOAT16_ERROR + 1e-4
        assert bool(((found.double() - expected).abs() <= bound).all())


def test_no_row_is_no_gradient(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    weight.requires_grad_()
    logits = compute_float32_logits(hidden[:0], weight, torch.bfloat16)
    logits.sum().backward()
    assert logits.shape == (0, VOCAB)
    assert weight.grad is not None
    assert not weight.grad.any()
