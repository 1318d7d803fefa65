import pytest
import torch

from areal_hpc.trainer.model import elementwise
from areal_hpc.trainer.model.elementwise import swiglu, weighted_swiglu
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
