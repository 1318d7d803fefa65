"""Grouped experts against a loop over experts: values, gradients, and the kernels they take."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model import elementwise
from areal_hpc.trainer.model.elementwise import RMSNorm, swiglu, weighted_swiglu
from areal_hpc.trainer.model.experts import ClearedGradients, GroupedExperts
from tests.support.plain_torch import check_gradients

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
    output, bias = experts(rows_RH, torch.tensor(counts), weights_R)
    expected = loop(experts, rows_RH, counts, weights_R)
    assert bias is None
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    for gradient, other in zip(
        torch.autograd.grad((output * direction_RH).sum(), inputs),
        torch.autograd.grad((expected * direction_RH).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-5)


def test_an_expert_without_rows_gets_no_gradient_whatever_a_kernel_leaves_there() -> None:
    weight = torch.ones(3, 2, 2, requires_grad=True)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    held = ClearedGradients.apply(weight, ends)  # type: ignore[no-untyped-call]
    left = torch.full((3, 2, 2), 7.0)
    left[1] = torch.nan
    held.backward(left)
    assert weight.grad is not None
    assert weight.grad.flatten(1).tolist() == [[7.0] * 4, [0.0] * 4, [7.0] * 4]


@pytest.mark.parametrize("chunk_values", [1, 1 << 18])
@pytest.mark.parametrize("shape", [(7, 1, 12), (0, 12), (5, 12)])
def test_the_gated_activation_is_silu_of_the_gate_times_up(
    shape: tuple[int, ...], chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(elementwise.CHUNK_ELEMENTS_BY_DEVICE, "cpu", chunk_values)
    gate_up = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    check_gradients(swiglu(gate_up), expected, [gate_up])


@pytest.mark.parametrize("chunk_values", [1, 1 << 18])
@pytest.mark.parametrize("rows", [0, 5])
def test_weights_of_rows_have_gradients_too(
    rows: int, chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(elementwise.CHUNK_ELEMENTS_BY_DEVICE, "cpu", chunk_values)
    gate_up = torch.randn(rows, 12, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(rows, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up * weights[:, None]
    check_gradients(weighted_swiglu(gate_up, weights), expected, [gate_up, weights])


@pytest.mark.parametrize("chunk_values", [1, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype, chunk_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(elementwise.CHUNK_ELEMENTS_BY_DEVICE, "cpu", chunk_values)
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 8, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(8) + 0.5)
    states = torch.randn(5, 1, 3, 8).to(dtype).transpose(0, 2).requires_grad_()
    expected = torch.nn.functional.rms_norm(states, (8,), norm.weight, 1e-6)
    check_gradients(norm(states), expected, (states, norm.weight))
