from __future__ import annotations

import pytest
import torch

from areal_hpc.trainer.model.kernels import rms_norm
from areal_hpc.trainer.model.kernels.swiglu import swiglu


@pytest.mark.parametrize("chunk_values", [1, 1 << 18])
@pytest.mark.parametrize("shape", [(7, 1, 12), (0, 12), (5, 12)])
def test_the_gated_activation_is_silu_of_the_gate_times_up(
    shape: tuple[int, ...], chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rms_norm.CHUNK_ELEMENTS, "cpu", chunk_values)
    gate_up = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    weights = torch.randn_like(expected)
    (want,) = torch.autograd.grad((expected * weights).sum(), gate_up)
    found = swiglu(gate_up)
    (got,) = torch.autograd.grad((found * weights).sum(), gate_up)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(got, want)
