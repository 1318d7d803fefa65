"""One rank's log-probabilities; several ranks are compared with transformers elsewhere."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from areal_hpc.trainer.model import elementwise, logprobs
from areal_hpc.trainer.model.logprobs import (
    SampleableTokens,
    compute_float32_logits,
    consume_logits_into_logprobs_and_entropy,
    consume_logits_into_token_logprobs,
)

ROWS, VOCAB, COLUMNS = 7, 11, 16
"""Five columns are padding."""


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in its stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(params=[1, 40, 1 << 18])
def chunk_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """One row, a few rows, or all rows at a time."""
    monkeypatch.setitem(elementwise.CHUNK_ELEMENTS_BY_DEVICE, "cpu", request.param)
    return int(request.param)


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("chunk_values")
def test_values_and_gradients_are_those_of_a_log_softmax(
    group: dist.ProcessGroup, dtype: torch.dtype, tempered: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    temperature = torch.rand(ROWS, generator=generator) + 0.5 if tempered else None
    weights = torch.randn(ROWS, generator=generator)

    ours = hidden.clone().requires_grad_()
    values, entropy = consume_logits_into_logprobs_and_entropy(
        ours * 1, labels, temperature, VOCAB, group
    )
    alone = consume_logits_into_token_logprobs(hidden.clone(), labels, temperature, VOCAB, group)
    assert torch.equal(values, alone), "the entropy changes no bit of what is trained"
    (values * weights).sum().backward()

    plain = hidden.clone().requires_grad_()
    logits = plain[:, :VOCAB].float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    expected = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    (expected * weights).sum().backward()

    chances = logits.detach().log_softmax(-1)
    torch.testing.assert_close(
        entropy.detach(), -(chances.exp() * chances).sum(-1), rtol=1e-4, atol=1e-5
    )
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected)
    assert ours.grad is not None
    assert plain.grad is not None
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, plain.grad)
    assert not ours.grad[:, VOCAB:].any()


@pytest.mark.parametrize("forbids", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("chunk_values")
def test_distributions_are_over_the_tokens_that_could_be_sampled(
    group: dist.ProcessGroup, dtype: torch.dtype, forbids: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    weights = torch.randn(ROWS, generator=generator)
    is_kept = torch.rand(ROWS, VOCAB, generator=generator) < 0.4
    is_kept[torch.arange(ROWS), labels] = True
    is_kept[3] = True  # all of them: noted as none
    forbids_N = (torch.arange(ROWS) % 2 == 0) & forbids
    is_listed = is_kept ^ forbids_N[:, None]
    listed = [[] if row == 3 else is_listed[row].nonzero()[:, 0].tolist() for row in range(ROWS)]
    counts = torch.tensor([len(one) for one in listed])
    starts = [0, *counts.cumsum(0).tolist()]
    ids = torch.tensor([token for one in listed for token in one])
    kept = SampleableTokens(ids, torch.arange(ROWS).repeat_interleave(counts), starts, forbids_N)

    ours = hidden.clone().requires_grad_()
    values, entropy = consume_logits_into_logprobs_and_entropy(
        ours * 1, labels, temperature, VOCAB, group, kept
    )
    alone = consume_logits_into_token_logprobs(
        hidden.clone(), labels, temperature, VOCAB, group, kept
    )
    assert torch.equal(values, alone)
    ((values + 0.5 * entropy) * weights).sum().backward()

    plain = hidden.clone().requires_grad_()
    logits = (plain[:, :VOCAB].float() / temperature[:, None]).masked_fill(~is_kept, -torch.inf)
    logprobs = logits.log_softmax(-1)
    expected = logprobs.gather(1, labels[:, None])[:, 0]
    surprise = -torch.where(is_kept, logprobs, 0.0)
    expected_entropy = (logprobs.exp() * surprise).sum(-1)
    ((expected + 0.5 * expected_entropy) * weights).sum().backward()

    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values, expected)
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-5)
    assert not ours.grad[:, :VOCAB][~is_kept].any()


@pytest.mark.parametrize("weight", [0.0, 1.0], ids=["alone", "beside log-probabilities"])
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.usefixtures("chunk_values")
def test_entropies_have_the_gradient_that_float64_gives_by_hand(
    group: dist.ProcessGroup, tempered: bool, weight: float
) -> None:
    generator = np.random.default_rng(3)
    hidden = generator.normal(0, 2, (ROWS, COLUMNS))
    labels = generator.integers(0, VOCAB, ROWS)
    temperature = generator.uniform(0.5, 1.5, ROWS) if tempered else np.ones(ROWS)
    slopes = generator.normal(0, 1, ROWS)

    logits = hidden[:, :VOCAB] / temperature[:, None]
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    chances = np.exp(logprobs)
    expected = -(chances * logprobs).sum(1)
    by_entropy = -chances * (logprobs + expected[:, None]) * slopes[:, None]
    by_logprob = (np.eye(VOCAB)[labels] - chances) * weight
    gradient = (by_entropy + by_logprob) / temperature[:, None]

    ours = torch.tensor(hidden, dtype=torch.float32, requires_grad=True)
    given = torch.tensor(temperature, dtype=torch.float32) if tempered else None
    values, entropy = consume_logits_into_logprobs_and_entropy(
        ours * 1, torch.from_numpy(labels), given, VOCAB, group
    )
    loss = (entropy * torch.tensor(slopes, dtype=torch.float32)).sum()
    (loss + weight * values.sum() if weight else loss).backward()
    assert ours.grad is not None
    np.testing.assert_allclose(entropy.detach(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.grad[:, :VOCAB], gradient, rtol=1e-5, atol=1e-6)
    assert not ours.grad[:, VOCAB:].any()


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
"""Of a log-probability, in nats."""
BFLOAT16_ERROR = 2**-8
"""Of rounding a number, as a share of it."""


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(STATES, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(params=[300, 1 << 14], ids=["blocks", "whole"])
def weight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of a head that is taken some columns at a time, or whole."""
    monkeypatch.setattr(logprobs, "VOCAB_BLOCK_COLUMNS", request.param)
    drawn = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(2))
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
    slopes = torch.randn(STATES, WORDS, generator=torch.Generator().manual_seed(3))
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
    assert logits.shape == (0, WORDS)
    assert weight.grad is not None
    assert not weight.grad.any()
