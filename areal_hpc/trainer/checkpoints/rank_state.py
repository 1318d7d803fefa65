"""A rank's part of a checkpoint: the numbers that its optimizer steps, and their positions.

A data-parallel rank steps consecutive numbers of some parameters. It stores their master weights,
their moments and the weights themselves, and no others: nothing is gathered. If several
tensor-parallel ranks, or the stages of a tied embedding, hold equal numbers, one rank stores them.
When a checkpoint is loaded, a rank of any layout finds its numbers by their positions in the whole
tensors; the other weights come from the other data-parallel ranks, as after every step.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from areal_hpc.errors import ArealError, ClusterError, RecipeError
from areal_hpc.rundir.checkpoints import (
    Column,
    NumberType,
    RankIndex,
    StoredTensor,
    TensorPiece,
    build_checkpoint_damage_error,
    compute_data_bytes,
)
from areal_hpc.trainer.checkpoints.stored_tensors import (
    TORCH_DTYPE_BY_NUMBER_TYPE,
    Box,
    StoredTensors,
    intersect_boxes,
    open_stored_tensors,
    split_flat_range,
    split_into_matrices,
)
from areal_hpc.trainer.collectives import all_reduce_max, raise_on_all_ranks
from areal_hpc.trainer.model.families.weight_map import EMBEDDING_NAME
from areal_hpc.trainer.model.policy import TrainedNetwork
from areal_hpc.trainer.optimizer import Optimizer
from areal_hpc.trainer.private_apis.megatron_private import OptimizerShard

CRITIC_PREFIX = "critic."


NetworkWithOptimizer = tuple[TrainedNetwork, Optimizer]


class PlaceInWholeTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    allows_shape_mismatch: bool
    """Whether another layout's tensor may have another shape, like the padded vocabulary."""


@dataclass(frozen=True, slots=True)
class StateShard:
    """Consecutive numbers of a parameter, in every column."""

    places: list[PlaceInWholeTensor]
    """Blocks of the numbers, one after another."""
    columns: dict[Column, torch.Tensor]
    """Flat tensors on the trainer's device or the host."""
    step: torch.Tensor
    """AdamW's step count."""
    is_kept: bool
    """Whether this rank stores the numbers; False if another rank does."""

    def iterate_places_with_offsets(self) -> Iterator[tuple[PlaceInWholeTensor, int]]:
        """Yield each place with the index of its first number within the shard."""
        first = 0
        for place in self.places:
            yield place, first
            first += place.box.numel


class RankState:
    """State of a rank's policy and optimizer, and of a critic's if there is one.

    It refers to live tensors, but for weights that FSDP2 divides: it holds a rounded copy of them,
    so build one for each save.
    """

    def __init__(
        self,
        policy: TrainedNetwork,
        optimizer: Optimizer,
        critic: NetworkWithOptimizer | None = None,
    ) -> None:
        self._device = policy.device
        self._shards_of = {"": _list_state_shards(policy, optimizer, "")}
        if critic is not None:
            self._shards_of[CRITIC_PREFIX] = _list_state_shards(*critic, CRITIC_PREFIX)
        self.types: dict[Column, NumberType] = {"exp_avg": "float32", "exp_avg_sq": "float32"}
        # Float32 before bfloat16: every column begins at a multiple of its item size.
        if policy.dtype == torch.float32:
            self.types["weight"] = "float32"
        else:
            self.types = {"master": "float32", **self.types, "weight": "bfloat16"}
        shards = itertools.chain.from_iterable(self._shards_of.values())
        self._kept = [shard for shard in shards if shard.is_kept]
        self._count = sum(shard.columns["weight"].numel() for shard in self._kept)

    @property
    def size_bytes(self) -> int:
        return compute_data_bytes(self.types, self._count)

    def read_optimizer_steps_over_all_ranks(self) -> dict[str, int]:
        """Return AdamW's step counts by prefix. A collective: a rank may have nothing to step."""
        steps = {}
        for prefix, shards in self._shards_of.items():
            # One tensor of all: on a GPU each `int` would make the host wait.
            own_steps = int(torch.stack([shard.step for shard in shards]).max()) if shards else 0
            steps[prefix] = all_reduce_max(own_steps)
        return steps

    def build_index(self, rank: int) -> RankIndex:
        tensors: dict[str, StoredTensor] = {}
        done = 0
        for shard in self._kept:
            for place, first in shard.iterate_places_with_offsets():
                stored = tensors.setdefault(place.name, StoredTensor(place.shape, []))
                stored.pieces.append(TensorPiece(rank, done + first, *place.box))
            done += shard.columns["weight"].numel()
        return RankIndex(self._count, tensors)

    def copy_to(self, memory: torch.Tensor) -> None:
        """Copy everything to host memory, column after column."""
        start = 0
        for column, type_ in self.types.items():
            size = compute_data_bytes({column: type_}, self._count)
            rest = memory[start : start + size].view(TORCH_DTYPE_BY_NUMBER_TYPE[type_])
            for shard in self._kept:
                numbers = shard.columns[column]
                rest[: numbers.numel()].copy_(numbers, non_blocking=True)
                rest = rest[numbers.numel() :]
            start += size
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def load_from(self, stored_tensors: StoredTensors) -> None:
        """Load everything from a checkpoint of any layout and type of weights.

        A critic that the checkpoint lacks stays unchanged.
        """
        for prefix, shards in self._shards_of.items():
            if not prefix or stored_tensors.find_shape(prefix + EMBEDDING_NAME):
                self._load_shards(
                    shards, stored_tensors, stored_tensors.count_optimizer_steps(prefix)
                )

    def _load_shards(
        self, shards: Sequence[StateShard], stored_tensors: StoredTensors, steps: int
    ) -> None:
        for shard in shards:
            for place in shard.places:
                _check_stored_shape(stored_tensors, place)
        for column in self.types:
            source = self._choose_source_column(column, stored_tensors)
            for shard in shards:
                for place, first in shard.iterate_places_with_offsets():
                    flat = shard.columns[column][first : first + place.box.numel]
                    _read_place(stored_tensors, source, place, flat.view(place.box.sizes))
        for shard in shards:
            shard.step.fill_(steps)

    def _choose_source_column(self, column: Column, stored_tensors: StoredTensors) -> Column:
        has_masters = stored_tensors.has_master_weights
        if column == "weight" and has_masters and "master" not in self.types:
            return "master"
        return "weight" if column == "master" and not has_masters else column


def load_checkpoint_into(
    policy: TrainedNetwork,
    optimizer: Optimizer,
    directory: Path,
    critic: NetworkWithOptimizer | None = None,
) -> None:
    """Restore weights and optimizer. A collective; the layout may differ from the saved one."""
    failure: ArealError | None = None
    try:
        with open_stored_tensors(directory) as stored:
            RankState(policy, optimizer, critic).load_from(stored)
    except FileNotFoundError as error:
        failure = build_checkpoint_damage_error(Path(error.filename), "the file is gone")
    except OSError as error:
        failure = ClusterError(
            f"a checkpoint cannot be read: {error}", key=str(directory), hint="check the mounts"
        )
    except ArealError as error:
        failure = error
    raise_on_all_ranks(failure)
    for network in (policy, *(() if critic is None else critic[:1])):
        if network.ddp_module is not None:
            network.ddp_module.start_param_sync()


def _list_state_shards(
    network: TrainedNetwork, optimizer: Optimizer, prefix: str
) -> list[StateShard]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": not network.arch.has_equal_layers}
    sharded = network.gpt.sharded_state_dict(metadata=metadata)
    parts: dict[torch.Tensor, list[ShardedTensor]] = {
        item.data: item.build() if isinstance(item, ShardedTensorFactory) else [item]
        for item in nested_values(extract_sharded_tensors_and_factories(sharded)[0])
    }
    return [
        _build_shard(shard, parts[shard.parameter], prefix, network.dtype)
        for shard in optimizer.list_shards()
    ]


def _build_shard(
    shard: OptimizerShard, sharded_tensors: list[ShardedTensor], prefix: str, dtype: torch.dtype
) -> StateShard:
    columns: dict[Column, torch.Tensor] = {
        "exp_avg": shard.moments["exp_avg"],
        "exp_avg_sq": shard.moments["exp_avg_sq"],
        "weight": shard.weights.to(dtype),  # FSDP2 rounds them anew for each pass
    }
    if dtype != torch.float32:
        columns["master"] = shard.master
    # The last number of an id distinguishes data-parallel ranks, each of which stores its range.
    is_kept = not any(sharded_tensors[0].replica_id[:-1])
    places = [
        place._replace(name=prefix + place.name)
        for place in _list_tensor_places(sharded_tensors, shard.start, shard.stop)
    ]
    return StateShard(places, columns, shard.moments["step"], is_kept)


def _list_tensor_places(
    sharded_tensors: list[ShardedTensor], start: int, stop: int
) -> Iterator[PlaceInWholeTensor]:
    base = 0
    for part in sharded_tensors:
        sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        whole = Box(tuple(part.global_offset), sizes)
        part_range = range(max(start - base, 0), min(stop - base, part.data.numel()))
        for block in split_flat_range(tuple(part.local_shape), part_range.start, part_range.stop):
            for box in split_into_matrices(block):  # stacked experts
                yield PlaceInWholeTensor(
                    part.key,
                    tuple(part.global_shape),
                    box.shift_from_within_to_whole(whole),
                    part.allow_shape_mismatch,
                )
        base += part.data.numel()


def _check_stored_shape(stored_tensors: StoredTensors, place: PlaceInWholeTensor) -> None:
    shape = stored_tensors.find_shape(place.name)
    if shape != place.shape and not (
        place.allows_shape_mismatch and shape and shape[1:] == place.shape[1:]
    ):
        key = "model"
        if place.name.startswith(CRITIC_PREFIX):
            key = "trainer.objective.critic.model"
        elif ".lora_" in place.name:
            key = "trainer.lora"
        raise RecipeError(
            f"the checkpoint has {shape or 'nothing'} under {place.name}, expected {place.shape}",
            key=key,
            hint="resume with the one that the run began with",
        )


def _read_place(
    stored_tensors: StoredTensors,
    column: Column,
    place: PlaceInWholeTensor,
    target: torch.Tensor,
) -> None:
    shape = stored_tensors.find_shape(place.name)
    if (common := intersect_boxes(place.box, Box((0,) * len(shape), shape))) is not None:
        stored_tensors.read_block(
            column,
            place.name,
            common,
            target[common.shift_to_coordinates_within(place.box).slices],
        )
