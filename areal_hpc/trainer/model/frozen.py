"""Networks that are scored and never trained: a reference, a teacher.

Divided over ranks as the policy is, and scored in like passes: one way serves a reference, which
may be the policy's own start, and a teacher of any size. On a GPU their weights lie in host memory
and are on the GPU while they score alone, before the step has any activations to keep.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from areal_hpc.recipe.sections.trainer import HeadDtype, ParallelConfig
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf
from areal_hpc.trainer.model.memory_estimate import drop_ep_for_dense_network
from areal_hpc.trainer.model.policy import Network, Policy, build_network
from areal_hpc.trainer.private_apis.torch_private import pin_host_memory


@dataclass(slots=True, eq=False)
class FrozenNetwork:
    """A network without gradients, whose weights wait on the host."""

    network: Network
    _host: dict[torch.nn.Parameter, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        parameters = list(self.network.gpt.parameters())
        places = torch.empty(sum(one.numel() for one in parameters), dtype=self.network.dtype)
        if self.network.device.type == "cuda" and len(places):
            pin_host_memory(places)
        parts = places.split([one.numel() for one in parameters])
        self._host = {
            one: part.view(one.shape) for one, part in zip(parameters, parts, strict=True)
        }
        for parameter, waiting in self._host.items():
            parameter.data = waiting

    @contextmanager
    def hold_weights_on_device(self) -> Iterator[Network]:
        """The network, ready to compute."""
        for parameter, waiting in self._host.items():
            parameter.data = waiting.to(self.network.device, non_blocking=True)
        try:
            yield self.network
        finally:
            for parameter, waiting in self._host.items():
                parameter.data = waiting

    def copy_weights_from(self, policy: Policy) -> None:
        held = dict(policy.gpt.named_parameters())
        for name, parameter in self.network.gpt.named_parameters():
            self._host[parameter].copy_(held[name].data)


def load_frozen_network(
    model_dir: Path,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    key: str,
    head_dtype: HeadDtype = "mixed",
) -> FrozenNetwork:
    """The network of a model directory, which the recipe names at `key`."""
    arch = read_architecture(model_dir)
    layout = drop_ep_for_dense_network(arch, parallel)
    network = build_network(arch, layout, dtype, device, head_dtype=head_dtype)
    frozen = FrozenNetwork(network)
    load_hf(network, HfModelReader(model_dir, key).read_tensor)
    return frozen
