"""Activations that wait in host memory."""

import torch

from areal_hpc.trainer.memory import MIN_OFFLOADED_BYTES, ActivationOffload


def test_large_activations_are_copied_and_parameters_stay() -> None:
    layer = torch.nn.Linear(64, 512, bias=False)
    large = torch.randn(1024, 64, requires_grad=True)
    small = torch.randn(2, 64, requires_grad=True)
    offload = ActivationOffload(layer.parameters())
    with offload:
        total = layer(large).tanh().sum() + layer(small).tanh().sum()
    kept_bytes = 4 * (large.numel() + 1024 * 512)  # the input, and the output of tanh
    assert kept_bytes > MIN_OFFLOADED_BYTES > 4 * 2 * 512
    assert offload.offloaded_bytes == kept_bytes
    (found,) = torch.autograd.grad(total, [layer.weight])
    (expected,) = torch.autograd.grad(
        layer(large).tanh().sum() + layer(small).tanh().sum(), [layer.weight]
    )
    assert torch.equal(found, expected)
