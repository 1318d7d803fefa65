"""This tier needs a CUDA device. Without one it fails; `make test` leaves it out."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.fail(
            f"tests/gpu needs a CUDA device and a PyTorch built for CUDA; PyTorch "
            f"{torch.__version__} sees none. Run `make gpu` on a machine that has one."
        )
    return torch.device("cuda", 0)
