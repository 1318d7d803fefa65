"""Weights in Hugging Face's form: load, stream, save.

No function ever holds the whole model: tensors are read, gathered and written one by one.
"""

import itertools
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.files import fsync_path, fsync_tree, make_folder
from areal_hpc.trainer.model.families.architecture import StoredParameters, find_stage_of_layer
from areal_hpc.trainer.model.families.lora import AdapterExport
from areal_hpc.trainer.model.families.weight_map import (
    EMBEDDING_NAME,
    HfTensorSpec,
    ParamMap,
    count_tp_shards,
    get_hf_slices,
    get_shard_shape,
    to_hf,
    to_megatron,
)
from areal_hpc.trainer.model.policy import Network, TrainedNetwork
from areal_hpc.trainer.model.sharding import copy_own_rows, gather_rows

HfTensorSpecWithDtype = tuple[str, tuple[int, ...], torch.dtype]
"""Name, shape and dtype."""

MAX_FILE_BYTES = 2 * 1024**3
"""Size of a safetensors file; its tensors are in host memory until it is written."""
ABANDONED_AFTER_S = 86_400.0

COPIED_FILE_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model directory that training does not change, except for the dtype in them."""

ReportBytes = Callable[[int, int], None]
"""Callback that takes the bytes written and the bytes in total, after each file."""


def write_hf_model_dir(
    tensors: Iterable[tuple[str, torch.Tensor]],
    specs: Sequence[HfTensorSpecWithDtype],
    source_dir: Path,
    target_dir: Path,
    *,
    files: StoredParameters | None = None,
    file_bytes: int = MAX_FILE_BYTES,
    on_file: ReportBytes = lambda done, total: None,
    adapter: AdapterExport | None = None,
) -> None:
    """Write safetensors files, their index, and `source_dir`'s other files and tensors.

    One file's tensors are in memory at a time. They must be exactly those of `specs`, in that
    order, which determine the number of files in advance. A new file begins at `file_bytes`. A
    hidden directory is filled, forced to disk, and then replaces `target_dir`.
    """
    make_folder(target_dir.parent)
    _delete_abandoned_folders(target_dir.parent)
    # Another process may write the same model: the trainer, or a person who exports it.
    partial = target_dir.with_name(f".{target_dir.name}.partial_{uuid.uuid4().hex}")
    partial.mkdir()
    dtype = specs[0][2]
    others = _read_other_tensors(source_dir, files) if files else {}
    _write_tensors(
        itertools.chain(tensors, others.items()),
        [*specs, *((name, tuple(other.shape), other.dtype) for name, other in others.items())],
        partial,
        file_bytes,
        on_file,
    )
    for name in COPIED_FILE_NAMES:
        if (source_dir / name).is_file():
            shutil.copyfile(source_dir / name, partial / name)
    _write_config_dtype(partial / "config.json", dtype)
    if adapter is not None:
        adapter.write(partial, source_dir)
    fsync_tree(partial)
    replaced = partial.with_name(f"{partial.name}.replaced")
    if target_dir.exists():
        target_dir.rename(replaced)
    partial.rename(target_dir)
    shutil.rmtree(replaced, ignore_errors=True)
    fsync_path(target_dir.parent)


def _read_other_tensors(source_dir: Path, files: StoredParameters) -> dict[str, torch.Tensor]:
    """Read the tensors that belong to no decoder, such as towers for images."""
    reader = HfModelReader(source_dir)
    decoder = (files.prefix, files.head)
    names = reader.list_tensor_names() if files.prefix != "model." else ()
    return {name: reader.read_whole_tensor(name) for name in names if not name.startswith(decoder)}


def _delete_abandoned_folders(directory: Path) -> None:
    """Delete folders of killed writers: hidden folders without a change for a day."""
    for path in directory.glob(".*.partial_*"):
        newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
        if time.time() - newest > ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _write_tensors(
    tensors: Iterator[tuple[str, torch.Tensor]],
    specs: Sequence[HfTensorSpecWithDtype],
    directory: Path,
    file_bytes: int,
    on_file: ReportBytes,
) -> None:
    parts = split_into_files(specs, file_bytes)
    total_bytes = sum(map(count_tensor_bytes, specs))
    written_bytes = 0
    file_of: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        if len(parts) == 1:
            file = "model.safetensors"
        tensors_of_file: dict[str, torch.Tensor] = {}
        for spec in part:
            name, tensor = next(tensors)
            if (name, tuple(tensor.shape), tensor.dtype) != spec:
                raise AssertionError(
                    f"expected {spec}, got {name} {tuple(tensor.shape)} {tensor.dtype}"
                )
            # A copy: the tensor may be a view of a parameter, or of memory that is reused.
            tensors_of_file[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        save_file(tensors_of_file, directory / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys((name for name, _, _ in part), file)
        written_bytes += sum(map(count_tensor_bytes, part))
        on_file(written_bytes, total_bytes)
    # Exhausts a collective stream, and proves that no tensor is left out.
    for name, _ in tensors:
        raise AssertionError(f"{name} is not in the specification")
    if len(parts) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def split_into_files(
    specs: Sequence[HfTensorSpecWithDtype], file_bytes: int
) -> list[list[HfTensorSpecWithDtype]]:
    """Divide tensors into files, in order: a file ends before it would exceed `file_bytes`."""
    parts: list[list[HfTensorSpecWithDtype]] = [[]]
    filled_bytes = 0
    for spec in specs:
        if filled_bytes and filled_bytes + count_tensor_bytes(spec) > file_bytes:
            parts.append([])
            filled_bytes = 0
        parts[-1].append(spec)
        filled_bytes += count_tensor_bytes(spec)
    return parts


def count_tensor_bytes(spec: HfTensorSpecWithDtype) -> int:
    _, shape, dtype = spec
    return torch.Size(shape).numel() * dtype.itemsize


def _write_config_dtype(config_path: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_path.read_bytes())
    name = str(dtype).removeprefix("torch.")
    # transformers before 5 names it torch_dtype.
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    if any(config.get(key) != name for key in keys):
        config |= dict.fromkeys(keys, name)
        config_path.write_text(json.dumps(config, indent=2) + "\n")


Slices = tuple[slice, ...]
ReadSlices = Callable[[HfTensorSpec, Slices], torch.Tensor]
"""Function that reads part of a Hugging Face tensor."""


class HfModelReader:
    """Reader of a model directory's tensors by name, each on request."""

    def __init__(self, model_dir: Path, key: str = "model.path") -> None:
        index = model_dir / "model.safetensors.index.json"
        if index.is_file():
            self._file_of = dict(json.loads(index.read_bytes())["weight_map"])
        elif (model_dir / "model.safetensors").is_file():
            with safe_open(model_dir / "model.safetensors", "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise RecipeError(
                f"no model.safetensors and no model.safetensors.index.json in {model_dir}",
                key=key,
                hint="save the model with save_pretrained(safe_serialization=True)",
            )
        self._dir, self._key = model_dir, key
        self._open: dict[str, Any] = {}

    def list_tensor_names(self) -> list[str]:
        return list(self._file_of)

    def read_tensor(self, tensor: HfTensorSpec, slices: Slices = ()) -> torch.Tensor:
        """Read some rows or columns of one tensor, or all of it, to the CPU, and nothing else."""
        stored = self._open_file(tensor.name).get_slice(tensor.name)
        shape = tuple(stored.get_shape())
        if shape != tensor.shape:
            raise RecipeError(
                f"{tensor.name} has shape {shape}, config.json says {tensor.shape}",
                key=self._key,
            )
        read: torch.Tensor = stored[slices or slice(None)]
        return read

    def read_whole_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor of any shape and dtype."""
        read: torch.Tensor = self._open_file(name).get_tensor(name)
        return read

    def _open_file(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise RecipeError(f"{self._dir} has no tensor {name}", key=self._key)
        if file not in self._open:
            self._open[file] = safe_open(self._dir / file, "pt")
        return self._open[file]


@torch.no_grad()
def load_hf(network: Network, read_slices: ReadSlices) -> None:
    """Fill this rank's parameters from the slices of Hugging Face tensors that they consist of."""
    tp = network.split.tp
    rank = parallel_state.get_tensor_model_parallel_rank()
    for parameter in network.weight_map:
        targets = [network.get_local_part(parameter)]
        if parameter.megatron == EMBEDDING_NAME:
            targets.append(network.tied_embedding_copy)
        present = [target for target in targets if target is not None]
        if not present:
            continue
        slices = get_hf_slices(parameter, network.arch, tp, rank)
        parts = [
            read_slices(tensor, part) for tensor, part in zip(parameter.hf, slices, strict=True)
        ]
        for target in present:
            copy_own_rows(target, to_megatron(parameter, parts, network.arch, tp))


def list_hf_specs(policy: TrainedNetwork) -> list[HfTensorSpecWithDtype]:
    """Return name, shape and dtype of every tensor of `stream_hf_tensors`, in order."""
    specs = []
    for parameter in policy.weight_map:
        dtype = _get_dtype(policy, parameter)
        specs += [(tensor.name, tensor.shape, dtype) for tensor in parameter.hf]
    return specs


def _get_dtype(policy: TrainedNetwork, parameter: ParamMap) -> torch.dtype:
    if not parameter.is_buffer:
        return policy.dtype
    local = policy.get_local_part(parameter)
    # Other stages may hold only the biases of routers, which are in float32.
    return torch.float32 if local is None else local.dtype


@torch.no_grad()
def stream_hf_tensors(policy: TrainedNetwork) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every whole tensor with its Hugging Face name, in the order of `list_hf_specs`.

    A collective over the tensor-, pipeline- and expert-parallel groups, or over all ranks if FSDP2
    divides the parameters: every rank must exhaust it, and gets the same tensors. A tensor may be a
    view of a live parameter: do not write to it.
    """
    experts: dict[str, torch.Tensor] = {}  # of one layer
    for parameter in policy.weight_map:
        if parameter.expert is None:
            shard = _broadcast_from_owner(policy, parameter)
        else:
            if parameter.expert == 0:
                experts[parameter.megatron] = _gather_experts(policy, parameter)
            shard = experts[parameter.megatron][parameter.expert]
        shards = _gather_shards(policy, shard, parameter)
        tensors = to_hf(parameter, shards, policy.arch)
        for tensor, spec in zip(tensors, parameter.hf, strict=True):
            yield spec.name, tensor


def list_sent_specs(policy: TrainedNetwork) -> list[HfTensorSpecWithDtype]:
    """Return name, shape and dtype of every tensor of `stream_sent_tensors`, in order."""
    if not policy.adapter.leaves_alone:
        return list_hf_specs(policy)
    tensors = policy.adapter.read_tensors().items()
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]


def stream_sent_tensors(policy: TrainedNetwork) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an update: those of `stream_hf_tensors`, or only an adapter's."""
    if policy.adapter.leaves_alone:
        return iter(policy.adapter.read_tensors().items())
    return stream_hf_tensors(policy)


def _broadcast_from_owner(policy: TrainedNetwork, parameter: ParamMap) -> torch.Tensor:
    stages = parallel_state.get_pipeline_model_parallel_group()
    local = policy.get_local_part(parameter)
    if stages.size() == 1:
        assert local is not None
        whole = gather_rows(local.detach(), policy.dtype)
        return policy.adapter.merge(parameter.megatron, whole)
    if local is None:
        shape = get_shard_shape(parameter, policy.arch, policy.split.tp)
        dtype = _get_dtype(policy, parameter)
        local = torch.empty(shape, dtype=dtype, device=policy.device)
    part = local.detach().contiguous()
    stage = _find_pipeline_stage(parameter, policy.arch.layers, stages.size())
    dist.broadcast(part, dist.get_global_rank(stages, stage), group=stages)
    return part


def _gather_experts(policy: TrainedNetwork, parameter: ParamMap) -> torch.Tensor:
    """Gather a parameter of all experts of a layer, in one collective."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    expert_ranks = parallel_state.get_expert_model_parallel_group()
    stage = _find_pipeline_stage(parameter, policy.arch.layers, stages.size())
    local = policy.get_stack(parameter)
    if local is not None and expert_ranks.size() == stages.size() == 1:
        return local.detach()
    shape = get_shard_shape(parameter, policy.arch, policy.split.tp)
    count = policy.experts_per_rank * expert_ranks.size()
    stack = torch.empty((count, *shape), dtype=policy.dtype, device=policy.device)
    if local is not None:
        dist.all_gather_into_tensor(stack, local.detach().contiguous(), group=expert_ranks)
    if stages.size() > 1:
        dist.broadcast(stack, dist.get_global_rank(stages, stage), group=stages)
    return stack


def _find_pipeline_stage(parameter: ParamMap, layers: int, stages: int) -> int:
    if parameter.layer is not None:
        return find_stage_of_layer(parameter.layer, layers, stages)
    return 0 if parameter.megatron == EMBEDDING_NAME else stages - 1


def _gather_shards(
    policy: TrainedNetwork, own_shard: torch.Tensor, parameter: ParamMap
) -> list[torch.Tensor]:
    ranks = count_tp_shards(parameter, policy.split.tp)
    if ranks == 1:
        return [own_shard]
    shards = [torch.empty_like(own_shard) for _ in range(ranks)]
    group = parallel_state.get_tensor_model_parallel_group()
    dist.all_gather(shards, own_shard.contiguous(), group=group)
    return shards


def save_hf_model(
    policy: TrainedNetwork, source_dir: Path, target_dir: Path, *, file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a model directory (`write_hf_model_dir`) from the weights of all ranks.

    A collective. Parameters are gathered one by one, and rank 0 writes each as it comes.
    """
    tensors = stream_hf_tensors(policy)
    if dist.get_rank() == 0:
        write_hf_model_dir(
            tensors,
            list_hf_specs(policy),
            source_dir,
            target_dir,
            files=policy.arch.parameters,
            file_bytes=file_bytes,
            adapter=policy.adapter,
        )
    for _ in tensors:  # the other ranks take part in the gathers
        pass
    dist.barrier()
