"""Low-rank adapters on networks of transformers' own modules, made by PEFT.

An adapted layer keeps its frozen weight as `base_layer`, beside two small matrices. Whoever is not
the trainer sees ordinary weights: each is merged, in float32, as it leaves; unless servers adapt
their own base (`trainer.lora.sync: adapter`), and are sent the small matrices under PEFT's names.
PEFT, which takes seconds to import, is imported where there is an adapter.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import LoraConfig
from areal_hpc.trainer.model.families.architecture import Architecture

ADAPTER_DIR = "adapter"
"""Below a model directory: what PEFT loads. Were its files beside the model's, transformers would
add the adapter to weights that have it already."""
_NAME = "default"
_PEFT_PREFIX = "base_model.model."

ReadTensor = Callable[[str], torch.Tensor]
"""Gives the numbers of a tensor of an adapter."""


def add_adapter(causal_lm: Any, lora: LoraConfig) -> Any:
    """Put an adapter into a network's layers, and freeze the rest; PEFT's model around it.

    Raises:
        RecipeError: It cannot be put there.
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
            # It gives a fused tensor of experts twice the rank, and then does not know its name.
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
    """Draw A and let B be zero: the network computes what its base does, whose weights it has."""
    torch.manual_seed(seed)
    for layer in _list_layers(causal_lm):
        layer.reset_lora_parameters(_NAME, True)
        for lengths in layer.lora_magnitude_vector.values():
            lengths.weight.copy_(layer.get_base_layer().weight.float().norm(dim=1))


@contextmanager
def switch_adapter_off(causal_lm: torch.nn.Module) -> Iterator[None]:
    """The time in which the network is its base."""
    layers = _list_layers(causal_lm)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def get_base_name(name: str) -> str:
    """A parameter's name without PEFT's layers; one of an adapter stays as it is."""
    return name if ".lora_" in name else name.replace(".base_layer", "")


class AdapterExport:
    """What an adapter, if the network has one, adds to weights and model directories."""

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
        """A weight of the base as the adapter changes it; itself if it does not."""
        path = self._path_by_weight.get(name)
        if path is None:
            return weight
        layer = copy.deepcopy(self._shapes.get_submodule(path))
        own = [key for key in layer.state_dict() if key.startswith("lora_")]
        numbers = {key: self._read(f"{path}.{key}").float() for key in own}
        layer.load_state_dict(numbers, strict=False, assign=True)
        merged = torch.nn.Parameter(weight.to(torch.float32, copy=True), requires_grad=False)
        setattr(layer.get_base_layer(), name.rpartition(".")[2], merged)
        layer.merge()
        return merged.data.to(weight.dtype)

    @property
    def leaves_alone(self) -> bool:
        """Servers are sent the adapter in the place of weights."""
        return self._lora is not None and self._lora.sync == "adapter"

    def read_tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors by the names that PEFT gives them in files.

        Raises:
            RecipeError: They are to be sent, and are of layers that servers do not adapt.
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
        held = {name: one.cpu().contiguous() for name, one in self.read_tensors().items()}
        save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self._peft_model.peft_config[_NAME])
        config.base_model_name_or_path, config.inference_mode = str(base), True
        config.save_pretrained(folder)
