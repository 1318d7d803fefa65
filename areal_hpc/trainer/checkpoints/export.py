"""Export of a checkpoint to a model directory that transformers and SGLang load. One process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.recipe.sections.trainer import LoraConfig
from areal_hpc.rundir.checkpoints import (
    Checkpoint,
    digest_base,
    list_checkpoints,
    require_same_base,
)
from areal_hpc.trainer.checkpoints.stored_tensors import (
    Box,
    StoredTensors,
    open_stored_tensors,
    split_into_matrices,
)
from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.trainer.model.families.architecture import Architecture, read_architecture
from areal_hpc.trainer.model.families.lora import AdapterExport
from areal_hpc.trainer.model.families.weight_map import (
    ParamMap,
    list_parameter_maps,
    to_hf,
    to_megatron,
)
from areal_hpc.trainer.model.hf_weights import (
    MAX_FILE_BYTES,
    HfModelReader,
    HfTensorSpecWithDtype,
    write_hf_model_dir,
)


def choose_checkpoint(directory: Path, step: int | None) -> Checkpoint:
    """Return the newest complete checkpoint, or that of one step.

    Raises:
        RecipeError: There is no such checkpoint.
    """
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        raise RecipeError(
            "the run has no complete checkpoint yet",
            key=str(directory),
            hint="wait for the first, or lower trainer.checkpoint_every_steps",
        )
    if step is None:
        return checkpoints[-1]
    for checkpoint in checkpoints:
        if checkpoint.state.step == step:
            return checkpoint
    steps = ", ".join(str(checkpoint.state.step) for checkpoint in checkpoints)
    raise RecipeError(
        f"there is no checkpoint of step {step}; the run holds {steps}",
        key=str(directory),
        hint=f"choose one of {steps}; trainer.keep_checkpoints says how many are kept",
    )


def export_checkpoint(
    checkpoint: Checkpoint,
    model_path: Path,
    target_dir: Path,
    print_line: Callable[[str], None],
    *,
    lora: LoraConfig | None = None,
    file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weights of a checkpoint, with `model_path`'s configuration and tokenizer.

    With `lora` write the weights at `model_path`, merged with the adapter, and also the adapter.

    Raises:
        RecipeError: The checkpoint belongs to another model.
        ShardError: The checkpoint is damaged.
        ClusterError: The checkpoint vanished during the export.
    """

    def progress(done_bytes: int, total_bytes: int) -> None:
        print_line(f"wrote {done_bytes / 2**20:,.1f} of {total_bytes / 2**20:,.1f} MiB")

    require_same_base(checkpoint, digest_base(model_path) if lora else "")
    try:
        with open_stored_tensors(checkpoint.path) as stored:
            arch = read_architecture(model_path, lora)
            weights = CheckpointWeights(stored, arch, checkpoint.path, model_path)
            write_hf_model_dir(
                weights.read_tensors(), weights.list_tensor_specs(), model_path, target_dir,
                files=arch.parameters, file_bytes=file_bytes, on_file=progress,
                adapter=weights.adapter,
            )  # fmt: skip
    except FileNotFoundError as error:
        raise ClusterError(
            f"a file vanished while it was read: {error.filename}",
            key=str(checkpoint.path),
            hint="a running trainer deletes old checkpoints: export a newer one",
        ) from error


_STORED_NAME_BY_PARAMETER = {
    # Megatron names norms as if Transformer Engine had fused them into the layer.
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def get_stored_name(parameter: ParamMap, arch: Architecture) -> str:
    """Return the checkpoint's tensor with this parameter of all experts, and of equal layers."""
    if parameter.layer is None:
        return parameter.megatron
    layer = "" if arch.has_equal_layers else f"{parameter.layer}."
    name = _STORED_NAME_BY_PARAMETER.get(parameter.megatron, parameter.megatron)
    experts = "" if parameter.expert is None else "mlp.experts.experts."
    return f"decoder.layers.{layer}{experts}{name}"


def _list_stacked_axes(parameter: ParamMap, arch: Architecture) -> list[tuple[int, int]]:
    """List the parameter's index, and the size, of the axes of layers and experts."""
    layer = parameter.layer if arch.has_equal_layers else None
    experts = 0 if arch.experts is None else arch.experts.count
    axes = ((layer, arch.layers), (parameter.expert, experts))
    return [(index, size) for index, size in axes if index is not None]


class CheckpointWeights:
    """Weights in a complete checkpoint, and those of the model that training does not change."""

    def __init__(
        self,
        stored_tensors: StoredTensors,
        arch: Architecture,
        directory: Path,
        model_path: Path,
    ) -> None:
        self._stored = stored_tensors
        self._arch = arch
        self._directory = directory
        self._model_path = model_path
        self.adapter = AdapterExport(arch, self._read_stored)
        for parameter in list_parameter_maps(arch):
            if parameter.is_trained:
                self._require_fitting_shape(parameter)

    def list_tensor_specs(self) -> list[HfTensorSpecWithDtype]:
        """Return name, shape and dtype of every tensor, in the order of `read_tensors`."""
        specs = []
        for parameter in list_parameter_maps(self._arch):
            dtype = self._stored.weight_dtype
            if parameter.is_buffer:
                dtype = self._read_parameter(parameter).dtype
            specs += [(tensor.name, tensor.shape, dtype) for tensor in parameter.hf]
        return specs

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by Hugging Face name; hold one Megatron parameter at a time."""
        for parameter in list_parameter_maps(self._arch):
            tensors = to_hf(parameter, [self._read_parameter(parameter)], self._arch)
            for spec, tensor in zip(parameter.hf, tensors, strict=True):
                yield spec.name, tensor

    def _read_parameter(self, parameter: ParamMap) -> torch.Tensor:
        if not parameter.is_trained:
            reader = HfModelReader(self._model_path)
            parts = [reader.read_tensor(tensor) for tensor in parameter.hf]
            weight = to_megatron(parameter, parts, self._arch, 1)
            if parameter.is_buffer:
                return weight
            return self.adapter.merge(parameter.megatron, weight.to(self._stored.weight_dtype))
        indices = tuple(index for index, _ in _list_stacked_axes(parameter, self._arch))
        return self._read_stored(get_stored_name(parameter, self._arch), indices)

    def _read_stored(self, name: str, indices: tuple[int, ...] = ()) -> torch.Tensor:
        shape = self._stored.find_shape(name)[len(indices) :]
        box = Box(indices + (0,) * len(shape), (1,) * len(indices) + shape)
        target = torch.empty(box.sizes, dtype=self._stored.weight_dtype)
        for block in split_into_matrices(box):
            part = target[block.shift_to_coordinates_within(box).slices]
            self._stored.read_block("weight", name, block, part)
        return target.reshape(shape)

    def _require_fitting_shape(self, parameter: ParamMap) -> None:
        name = get_stored_name(parameter, self._arch)
        stored = self._stored.find_shape(name)
        stacked = tuple(size for _, size in _list_stacked_axes(parameter, self._arch))
        rows, rest = sum(tensor.shape[0] for tensor in parameter.hf), parameter.hf[0].shape[1:]
        if parameter.shape:
            rows, rest = parameter.shape[0], parameter.shape[1:]
        # A vocabulary is padded to a multiple of its number of parts.
        may_be_padded = not stacked and stored[1:] == rest and stored[:1] > (rows,)
        if stored != (*stacked, rows, *rest) and not may_be_padded:
            raise RecipeError(
                f"the checkpoint has {stored or 'nothing'} under {name}, "
                f"expected {(*stacked, rows, *rest)}",
                key=str(self._directory),
                hint="export with the recipe that the run was trained with",
            )
