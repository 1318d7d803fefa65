"""A critic: the network of a model directory with a head for values, divided as the policy is."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.families.weight_map import (
    OUTPUT_LAYER_NAME,
    HfTensorSpec,
    ParamMap,
    TpSplit,
    list_parameter_maps,
)
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf
from areal_hpc.trainer.model.memory_estimate import drop_ep_for_dense_network
from areal_hpc.trainer.model.policy import (
    TORCH_DTYPE_BY_NAME,
    TrainedNetwork,
    build_network,
    wrap_for_training,
)

HEAD_TENSOR_NAME = "score.weight"
"""The head of transformers' classifiers and reward models of one output."""


@dataclass(slots=True, eq=False, kw_only=True)
class Critic(TrainedNetwork):
    """The network that learns values, as it is trained."""

    has_stored_head: bool = False
    """The model directory has a head; else it begins at 0, and so do all values."""

    @property
    def weight_map(self) -> list[ParamMap]:
        """What is read from the model directory."""
        table = [one for one in list_parameter_maps(self.arch) if one.megatron != OUTPUT_LAYER_NAME]
        if self.has_stored_head:
            head = HfTensorSpec(HEAD_TENSOR_NAME, (1, self.arch.hidden))
            table.append(ParamMap(OUTPUT_LAYER_NAME, (head,), TpSplit.WHOLE))
        return table


def load_critic(model_dir: Path, config: TrainerConfig, device: torch.device, key: str) -> Critic:
    """The critic of a model directory, which the recipe names at `key`, with its weights."""
    # Its head is never that of the embedding, however the policy's is.
    arch = replace(read_architecture(model_dir), tied=False)
    parallel, dtype = (
        drop_ep_for_dense_network(arch, config.parallel),
        TORCH_DTYPE_BY_NAME[config.dtype],
    )
    network = build_network(arch, parallel, dtype, device, config.activations, gives_values=True)
    reader = HfModelReader(model_dir, key)
    critic = Critic(
        arch=arch,
        gpt=network.gpt,
        dtype=dtype,
        device=device,
        split=network.split,
        rope_frequencies=network.rope_frequencies,
        ddp_module=wrap_for_training(network),
        offloads_activations=config.offload.activations,
        has_stored_head=reader.has_tensor(HEAD_TENSOR_NAME),
    )
    load_hf(critic, reader.read_tensor)
    return critic
