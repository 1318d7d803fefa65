from types import SimpleNamespace

import pytest
import torch

from areal_hpc.trainer.model import elementwise
from areal_hpc.trainer.model.elementwise import RMSNorm
from tests.support.plain_torch import check_gradients


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
