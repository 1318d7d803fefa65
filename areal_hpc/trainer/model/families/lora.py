"""Low-rank adapters (LoRA) on networks of transformers' own modules, made by PEFT.

An adapted layer keeps its frozen weight as `base_layer`, beside two small matrices. Outside the
trainer weights are ordinary: each is merged, in float32, on export or update; unless servers adapt
their own base (`trainer.lora.sync: adapter`), and receive the small matrices under PEFT's names.
PEFT takes seconds to import, and is imported only for an adapter.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import LoraConfig
from areal_hpc.trainer.model.families.architecture import Architecture

ADAPTER_DIR = "adapter"
"""Folder below a model directory that PEFT loads. With its files beside the model's, transformers
would add the adapter to weights that already include it."""
_NAME = "default"
_PEFT_PREFIX = "base_model.model."

ReadTensor = Callable[[str], torch.Tensor]
"""Function that reads a tensor of an adapter."""


def add_adapter(causal_lm: Any, lora: LoraConfig) -> Any:
    """Put an adapter into a network's layers, and freeze the rest; return PEFT's model around it.

    Raises:
        RecipeError: PEFT cannot adapt these layers.
    """
    import peft

    targets = lora.target_modules
    config = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    hint = "trainer.lora.target_modules=all-linear adapts all linear layers but the head"
    try:
        with warnings.catch_warnings():
            # PEFT gives a fused tensor of experts twice the rank, and then does not find its name.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not")
            adapted = peft.get_peft_model(causal_lm, config, _NAME, autocast_adapter_dtype=False)
    except ValueError as error:
        raise RecipeError(f"PEFT says: {error}", key="trainer.lora", hint=hint) from error
    tables = {causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()}
    if tables.intersection(_list_layers(causal_lm)):
        message = "the embedding and the head cannot be adapted"
        raise RecipeError(message, key="trainer.lora.target_modules", hint=hint)
    return adapted


def _list_layers(causal_lm: torch.nn.Module) -> list[Any]:
    return [module for module in causal_lm.modules() if hasattr(module, "lora_A")]


@torch.no_grad()
def initialize_adapter(causal_lm: torch.nn.Module, seed: int) -> None:
    """Draw A and set B to zero: the network then computes the same as its base."""
    torch.manual_seed(seed)
    for layer in _list_layers(causal_lm):
        layer.reset_lora_parameters(_NAME, True)
        for lengths in layer.lora_magnitude_vector.values():
            lengths.weight.copy_(layer.get_base_layer().weight.float().norm(dim=1))


def seed_dropout(seed: int, step: int) -> None:
    """Make an adapter's dropout in a step depend on the step alone, not on when it runs."""
    seeds = np.random.SeedSequence((seed, step, dist.get_rank()))
    torch.manual_seed(int(seeds.generate_state(1)[0]))


@contextmanager
def switch_adapter_off(causal_lm: torch.nn.Module) -> Iterator[None]:
    """Let the network compute as its base during the block."""
    layers = _list_layers(causal_lm)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def get_base_name(name: str) -> str:
    """Return a parameter's name without PEFT's layers; an adapter's name is unchanged."""
    return name if ".lora_" in name else name.replace(".base_layer", "")


class AdapterExport:
    """Export of a network's adapter, if it has one: merged weights, or the adapter's own files."""

    def __init__(self, arch: Architecture, read: ReadTensor) -> None:
        self._read, self._lora = read, arch.lora
        self._path_by_weight: dict[str, str] = {}
        if arch.lora is None:
            return
        from areal_hpc.trainer.model.families.transformers_modules import build_shapes

        self._shapes = build_shapes(json.loads(arch.transformers_config))
        self._peft_model = add_adapter(self._shapes, arch.lora)
        for path, layer in self._shapes.named_modules():
            if hasattr(layer, "lora_A"):
                adapted = f"{path}.{getattr(layer, 'parameter_name', 'weight')}"
                self._path_by_weight[get_base_name(adapted)] = path

    def merge(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Merge the adapter into a weight of the base; return other weights unchanged."""
        path = self._path_by_weight.get(name)
        if path is None:
            return weight
        layer = copy.deepcopy(self._shapes.get_submodule(path))
        keys = [key for key in layer.state_dict() if key.startswith("lora_")]
        numbers = {key: self._read(f"{path}.{key}").float() for key in keys}
        layer.load_state_dict(numbers, strict=False, assign=True)
        merged = torch.nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        setattr(layer.get_base_layer(), name.rpartition(".")[2], merged)
        layer.merge()
        return merged.data.to(weight.dtype)

    @property
    def leaves_alone(self) -> bool:
        """Whether updates send servers the adapter in place of weights."""
        return self._lora is not None and self._lora.sync == "adapter"

    def read_tensors(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors with the names that PEFT gives them in files.

        Raises:
            RecipeError: Updates send them, and servers do not adapt some of their layers.
        """
        import peft

        names = [name for name in self._shapes.state_dict() if ".lora_" in name]
        numbers = {_PEFT_PREFIX + name: self._read(name).detach() for name in names}
        tensors: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(
            self._peft_model, numbers, save_embedding_layers=False
        )
        if self._lora is not None and self.leaves_alone:
            ends = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
            if others := ends.difference(self._lora.served_modules):
                raise RecipeError(
                    f"servers would not adapt {', '.join(sorted(others))}",
                    key="trainer.lora.sync",
                    hint="use trainer.lora.sync=merged, or other trainer.lora.target_modules",
                )
        return tensors

    def write(self, model_dir: Path, base: Path) -> None:
        """Write the folder that PEFT loads, for the model at `base`, into a model directory."""
        if not self._path_by_weight:
            return
        folder = model_dir / ADAPTER_DIR
        folder.mkdir()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.read_tensors().items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self._peft_model.peft_config[_NAME])
        config.base_model_name_or_path, config.inference_mode = str(base), True
        config.save_pretrained(folder)
