"""Grouped experts against a loop over experts: values, gradients, and the kernels they take."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model.experts import ClearedGradients, GroupedExperts

HIDDEN, FFN = 32, 16


def build(experts: int, dtype: torch.dtype = torch.float32) -> GroupedExperts:
    config = SimpleNamespace(
        moe_ffn_hidden_size=FFN, hidden_size=HIDDEN, params_dtype=dtype, use_cpu_initialization=True
    )
    built = GroupedExperts(experts, config, SimpleNamespace(ep=None, expt_dp=None))
    chance = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in built.parameters():
            weight.copy_(torch.randn(weight.shape, generator=chance) * 0.2)
    return built


def loop(
    experts: GroupedExperts, rows_RH: torch.Tensor, counts: list[int], weights_R: torch.Tensor
) -> torch.Tensor:
    outputs = []
    parts = zip(rows_RH.split(counts), weights_R.split(counts), strict=True)
    for number, (rows, weights) in enumerate(parts):
        gate, up = F.linear(rows, experts.linear_fc1.weight[number]).chunk(2, -1)
        product = (F.silu(gate) * up * weights[:, None]).to(rows.dtype)
        outputs.append(F.linear(product, experts.linear_fc2.weight[number]))
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [[3, 0, 7, 5], [0, 0, 0, 40], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_outputs_and_gradients_are_those_of_the_loop(counts: list[int]) -> None:
    experts, chance = build(len(counts)), torch.Generator().manual_seed(1)
    rows_RH = torch.randn(sum(counts), HIDDEN, generator=chance, requires_grad=True)
    weights_R = torch.rand(sum(counts), generator=chance, requires_grad=True)
    direction_RH = torch.randn(sum(counts), HIDDEN, generator=chance)
    inputs = [rows_RH, weights_R, *experts.parameters()]
    found, bias = experts(rows_RH, torch.tensor(counts), weights_R)
    expected = loop(experts, rows_RH, counts, weights_R)
    assert bias is None
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for one, other in zip(
        torch.autograd.grad((found * direction_RH).sum(), inputs),
        torch.autograd.grad((expected * direction_RH).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_an_expert_without_rows_gets_no_gradient_whatever_a_kernel_leaves_there() -> None:
    weight = torch.ones(3, 2, 2, requires_grad=True)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    held = ClearedGradients.apply(weight, ends)  # type: ignore[no-untyped-call]
    left = torch.full((3, 2, 2), 7.0)
    left[1] = torch.nan
    held.backward(left)
    assert weight.grad is not None
    assert weight.grad.flatten(1).tolist() == [[7.0] * 4, [0.0] * 4, [7.0] * 4]
