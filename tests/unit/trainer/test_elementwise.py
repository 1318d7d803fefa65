from types import SimpleNamespace

import pytest
import torch

from areal_hpc.trainer.model import elementwise
from areal_hpc.trainer.model.elementwise import RMSNorm, swiglu, weighted_swiglu
from tests.support.plain_torch import check_gradients


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
