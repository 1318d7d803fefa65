"""One rank's log-probabilities; several ranks are compared with transformers elsewhere."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from areal_hpc.trainer.model.kernels import rms_norm
from areal_hpc.trainer.model.kernels.logprobs import KeptTokens, compute_token_logprobs

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
    monkeypatch.setitem(rms_norm.CHUNK_ELEMENTS, "cpu", request.param)
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
    entropy = torch.empty(ROWS)
    values = compute_token_logprobs(ours * 1, labels, temperature, VOCAB, group, entropy)
    alone = compute_token_logprobs(hidden.clone(), labels, temperature, VOCAB, group)
    assert torch.equal(values, alone), "the entropy changes no bit of what is trained"
    (values * weights).sum().backward()

    plain = hidden.clone().requires_grad_()
    logits = plain[:, :VOCAB].float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    expected = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    (expected * weights).sum().backward()

    chances = logits.detach().log_softmax(-1)
    torch.testing.assert_close(entropy, -(chances.exp() * chances).sum(-1), rtol=1e-4, atol=1e-5)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected)
    assert ours.grad is not None
    assert plain.grad is not None
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, plain.grad)
    assert not ours.grad[:, VOCAB:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("chunk_values")
def test_distributions_are_over_the_tokens_that_could_be_sampled(
    group: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    weights = torch.randn(ROWS, generator=generator)
    is_kept = torch.rand(ROWS, VOCAB, generator=generator) < 0.4
    is_kept[torch.arange(ROWS), labels] = True
    is_kept[3] = True  # all of them: noted as none
    listed = [[] if row == 3 else is_kept[row].nonzero()[:, 0].tolist() for row in range(ROWS)]
    counts = torch.tensor([len(one) for one in listed])
    starts = [0, *counts.cumsum(0).tolist()]
    ids = torch.tensor([token for one in listed for token in one])
    kept = KeptTokens(ids, torch.arange(ROWS).repeat_interleave(counts), starts)

    ours = hidden.clone().requires_grad_()
    entropy = torch.empty(ROWS)
    values = compute_token_logprobs(ours * 1, labels, temperature, VOCAB, group, entropy, kept)
    (values * weights).sum().backward()

    plain = hidden.clone().requires_grad_()
    logits = (plain[:, :VOCAB].float() / temperature[:, None]).masked_fill(~is_kept, -torch.inf)
    expected = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    (expected * weights).sum().backward()

    chances = logits.detach().log_softmax(-1).exp()
    surprise = torch.where(is_kept, -chances.log(), 0.0)
    torch.testing.assert_close(entropy, (chances * surprise).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values, expected)
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad)
    assert not ours.grad[:, :VOCAB][~is_kept].any()


def test_the_gradient_takes_the_place_of_the_logits(group: dist.ProcessGroup) -> None:
    leaf = torch.randn(ROWS, COLUMNS, requires_grad=True)
    logits = leaf * 1
    values = compute_token_logprobs(logits, torch.zeros(ROWS, dtype=torch.long), None, VOCAB, group)
    values.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(logits.detach(), leaf.grad)


def test_no_rows_give_no_values_and_no_gradient(group: dist.ProcessGroup) -> None:
    empty = torch.zeros(0, COLUMNS, requires_grad=True)
    values = compute_token_logprobs(empty * 1, torch.zeros(0, dtype=torch.long), None, VOCAB, group)
    values.sum().backward()
    assert values.shape == (0,)
