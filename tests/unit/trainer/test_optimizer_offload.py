"""Steps of an optimizer whose state is on the host, chunk after chunk, against torch's own; and
steps by one kernel, which GPUs get, against those by many."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.memory import MIN_OFFLOADED_BYTES, ActivationOffload
from areal_hpc.trainer.optimizer import (
    MOMENT_NAMES,
    HostAdamW,
    hold_master_stand_ins,
    offload_optimizer,
    switch_adamw_to_fused_kernel,
)

SIZES = (1000, 7, 4096)
CHUNK = 256
"""Elements: of the first parameter three whole ones and a rest, of the second less than one."""


class Optimizer:
    """AdamW over float32 parameters as Megatron's distributed optimizer holds them."""

    def __init__(
        self, *, has_masters: bool = True, is_offloaded: bool = False, is_fused: bool = False
    ) -> None:
        chance = torch.Generator().manual_seed(5)
        self.parameters = [torch.randn(size, generator=chance) for size in SIZES]
        self.adam = torch.optim.AdamW(self.parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for parameter in self.parameters:
            self.adam.state[parameter] = {
                "step": torch.tensor(0.0),
                **{name: torch.zeros_like(parameter) for name in MOMENT_NAMES},
            }
        masters = [self.parameters] if has_masters else [[]]
        part = SimpleNamespace(optimizer=self.adam, shard_fp32_from_float16_groups=masters)
        self.megatron: Any = SimpleNamespace(chained_optimizers=[part])
        if is_fused:
            switch_adamw_to_fused_kernel(self.megatron, torch.device("cpu"))
        if is_offloaded:
            offload_optimizer(self.megatron, torch.device("cpu"), CHUNK)

    def step(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        with hold_master_stand_ins(self.megatron):
            for parameter in self.parameters:
                parameter.grad = torch.randn(parameter.shape, generator=chance)
            self.adam.step()

    @property
    def content(self) -> list[torch.Tensor]:
        moments = [self.adam.state[parameter] for parameter in self.parameters]
        return [
            *self.parameters,
            *(one[name] for one in moments for name in ("step", *MOMENT_NAMES)),
        ]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("has_masters", [True, False])
def test_steps_have_the_same_bits(has_masters: bool, is_fused: bool) -> None:
    plain = Optimizer(has_masters=has_masters, is_fused=is_fused)
    offloaded = Optimizer(has_masters=has_masters, is_offloaded=True, is_fused=is_fused)
    assert isinstance(offloaded.adam, HostAdamW)
    for seed in range(4):
        plain.step(seed)
        offloaded.step(seed)
        for expected, found in zip(plain.content, offloaded.content, strict=True):
            assert torch.equal(expected, found)


def test_what_is_lent_takes_no_memory_and_comes_back_when_no_step_is_taken() -> None:
    offloaded = Optimizer(has_masters=True, is_offloaded=True)
    before = [tensor.clone() for tensor in offloaded.content]
    with hold_master_stand_ins(offloaded.megatron):
        for parameter, size in zip(offloaded.parameters, SIZES, strict=True):
            assert parameter.shape == (size,)
            assert parameter.untyped_storage().nbytes() == 4
            parameter.grad = torch.ones(size)
    assert all(parameter.grad is None for parameter in offloaded.parameters)
    for expected, found in zip(before, offloaded.content, strict=True):
        assert torch.equal(expected, found)


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
