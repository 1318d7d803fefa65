"""Estimate of a trainer rank's memory, on its GPU and on its node. Pure, no torch.

It counts everything whose size follows from shapes; CUDA's context, kernels' workspace and
fragmentation are covered by `RESERVE_BYTES`, which is an assumption. Sources:

- optimizer state sharded over data-parallel ranks: Megatron-core's distributed optimizer (6 + 12/d
  bytes per parameter in bfloat16; docs/source/api-guide/dist_optimizer.md of Megatron-LM);
- activations: `activation_memory.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from areal_hpc.recipe.sections.trainer import ParallelConfig, TrainerConfig
from areal_hpc.trainer.model.activation_memory import (
    BYTES_BY_DTYPE,
    count_layer_activation_bytes,
    count_stage_activation_bytes,
)
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    list_stage_layers,
)
from areal_hpc.trainer.model.parameter_counts import (
    count_critic_stage_parameters,
    count_stage_parameters,
    count_trained_parameters,
    get_side_layout,
)

GIB = 2**30
RESERVE_BYTES = 2 * GIB
"""CUDA's context and the workspace of matrix products. An assumption, not measured."""
COMMUNICATOR_BYTES = 24 * ((4 << 20) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)
"""Memory of one NCCL communicator on a GPU: 24 channels of a ring, each with the buffers of three
protocols (src/init.cc of NCCL). The number of channels is an assumption: NCCL uses fewer over slow
links, and trees need more."""
SENT_BUCKET_BYTES = 512 * 2**20
"""Weights that the sender packs at a time, into one of two buffers (`weights/buckets.py`)."""
OPTIMIZER_CHUNK_ELEMENTS = 1 << 24
"""Elements of an offloaded optimizer state that are on the GPU at a time (`trainer/optimizer.py`):
64 MiB of each master weight and moment."""
LOGIT_BYTES = 4
"""Bytes of a logit, in float32."""
PARALLEL_NAMES = ("tp", "pp", "cp", "dp", "ep")


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on the trainer's fullest GPU, and its pipeline stage."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    communicators: int = 0
    """Buffers of NCCL's communicators, including those to replicas, and packed weights."""
    host_activations: int = 0
    """Host memory of this GPU's offloaded activations."""
    host_optimizer: int = 0
    """Host memory of this GPU's offloaded master weights and moments."""
    scoring: int = 0
    """Memory of the largest frozen network while it scores, before there are activations."""
    host_frozen: int = 0
    """Host memory of the frozen networks' weights."""

    @property
    def total(self) -> int:
        state = self.parameters + self.gradients + self.optimizer
        passes = max(self.activations, self.scoring) + self.logits
        return state + passes + self.communicators + RESERVE_BYTES


def estimate_trainer_memory(
    arch: Architecture,
    config: TrainerConfig,
    update_groups: int = 0,
    frozen: Sequence[Architecture] = (),
    critic: Architecture | None = None,
) -> TrainerMemory:
    """Estimate the trainer's fullest GPU; rank 0 sends weights to `update_groups` groups.

    `frozen` networks score each batch before training; a `critic` trains beside the policy.
    """
    stages = [
        estimate_stage_memory(arch, config, stage, frozen, critic)
        for stage in range(config.parallel.pp)
    ]
    first = stages[0]
    sending = first.communicators + update_groups * COMMUNICATOR_BYTES
    if update_groups:
        largest = arch.vocab * arch.hidden
        if arch.parameters is not None and arch.parameters.has_stacked_experts:
            largest = max(largest, arch.parameters.experts * 2 // 3 // arch.layers)
        sending += 2 * max(SENT_BUCKET_BYTES, BYTES_BY_DTYPE[config.dtype] * largest)
    stages[0] = replace(first, communicators=sending)
    return max(stages, key=lambda memory: memory.total)


def estimate_checkpoint_copy_bytes(
    arch: Architecture, config: TrainerConfig, critic: Architecture | None = None
) -> int:
    """Estimate the bytes of a rank's checkpoint copy in host memory, for the fullest stage.

    In bfloat16 weights, float32 master weights and moments; float32 weights need no masters.
    """
    each, parallel = 12 if config.dtype == "float32" else 14, config.parallel
    undivided = parallel.model_copy(update={"tp": 1, "ep": 1})
    fullest = max(
        sum(count_trained_parameters(arch, undivided, stage))
        + sum(count_critic_stage_parameters(critic, undivided, stage))
        for stage in range(parallel.pp)
    )
    return each * fullest * parallel.pp // parallel.world_size


def estimate_stage_memory(
    arch: Architecture,
    config: TrainerConfig,
    stage: int,
    frozen: Sequence[Architecture] = (),
    critic: Architecture | None = None,
) -> TrainerMemory:
    """Estimate a GPU of one pipeline stage during a step."""
    parallel, tokens = config.parallel, config.max_tokens_per_microbatch
    parameters, gradients, optimizer = _count_state_bytes(arch, config, stage, critic)
    host_optimizer = optimizer if config.offload.optimizer else 0
    if host_optimizer:
        chunk = _get_optimizer_bytes(config) * OPTIMIZER_CHUNK_ELEMENTS
        optimizer = min(optimizer, chunk)
    activations, host_activations = _count_activation_bytes(arch, config, stage, critic)
    scoring, host_frozen = _count_scoring_bytes(frozen, config, stage)
    logits = tokens // parallel.cp * (-(-arch.vocab // parallel.tp)) * LOGIT_BYTES
    return TrainerMemory(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits if stage == parallel.pp - 1 else 0,
        communicators=count_rank_communicators(arch, parallel) * COMMUNICATOR_BYTES,
        host_activations=host_activations,
        host_optimizer=host_optimizer,
        scoring=scoring,
        host_frozen=host_frozen,
    )


def _get_optimizer_bytes(config: TrainerConfig) -> int:
    """Return bytes per parameter: moments in float32, with bfloat16 also a float32 copy."""
    return 8 if config.dtype == "float32" else 12


def _count_state_bytes(
    arch: Architecture, config: TrainerConfig, stage: int, critic: Architecture | None
) -> tuple[int, int, int]:
    """Count bytes of parameters, gradients and optimizer state, on the GPU or offloaded."""
    parallel, element = config.parallel, BYTES_BY_DTYPE[config.dtype]
    counts = (
        count_trained_parameters(arch, parallel, stage),
        count_critic_stage_parameters(critic, parallel, stage),
    )
    dense, experts = (sum(pair) for pair in zip(*counts, strict=True))
    frozen = 0
    if arch.lora is not None:
        frozen = element * sum(count_stage_parameters(arch, parallel, stage))
    sharing_ranks = parallel.dp * parallel.cp
    expert_sharing_ranks = parallel.tp * sharing_ranks // parallel.ep
    each = _get_optimizer_bytes(config)
    optimizer = each * dense // sharing_ranks + each * experts // expert_sharing_ranks
    trained = dense + experts
    if not parallel.shard_parameters:
        return trained * element + frozen, trained * 4, optimizer
    # FSDP2 also divides weights and gradients, and gathers the tables and one layer at a time.
    tables = arch.vocab * arch.hidden * (1 if arch.tied else 2)
    gathered = element * (tables + 2 * ((trained - tables) // arch.layers))
    part = trained * 4 // sharing_ranks + gathered
    return part + frozen, part, optimizer


def _count_activation_bytes(
    arch: Architecture, config: TrainerConfig, stage: int, critic: Architecture | None
) -> tuple[int, int]:
    """Count bytes of activations on the GPU and in host memory."""
    parallel, tokens = config.parallel, config.max_tokens_per_microbatch
    trained = [arch] if critic is None else [arch, critic]  # one after the other
    # 1F1B: stage s has begun pp - s micro-batches before the first one returns.
    kept = (parallel.pp - stage) * max(
        count_stage_activation_bytes(
            network, config, list_stage_layers(network.layers, parallel.pp, stage), tokens
        )
        for network in trained
    )
    if config.recompute == "none" and not config.offload.activations:
        return kept, 0
    # The backward pass needs one layer's activations at a time, offloaded or not.
    whole = max(
        count_layer_activation_bytes(network, parallel, config.dtype, tokens) for network in trained
    )
    return (whole, kept) if config.offload.activations else (kept + whole, 0)


def _count_scoring_bytes(
    frozen: Sequence[Architecture], config: TrainerConfig, stage: int
) -> tuple[int, int]:
    """Count bytes of the largest frozen network while it scores, and of all in host memory."""
    parallel, tokens = config.parallel, config.max_tokens_per_microbatch
    weights, scoring = 0, 0
    for network in frozen:
        layout = get_side_layout(network, parallel)
        parameters = sum(count_stage_parameters(network, layout, stage))
        own_bytes = BYTES_BY_DTYPE[config.dtype] * parameters
        layer = count_layer_activation_bytes(network, parallel, config.dtype, tokens)
        weights, scoring = weights + own_bytes, max(scoring, own_bytes + layer)
    return scoring, weights


def count_rank_communicators(arch: Architecture, parallel: ParallelConfig) -> int:
    """Count a trainer rank's NCCL communicators with other ranks: groups that reduce or send.

    They are made in the first collective of a group; groups of one rank have no buffers.
    """
    sizes = [
        parallel.tp,
        parallel.pp,
        parallel.cp,
        parallel.dp * parallel.cp,  # gradients and parameters of the distributed optimizer
        parallel.world_size,  # the gradient's norm
    ]
    if arch.experts is not None:
        # Tokens to experts; the gradients of experts.
        sizes += [parallel.ep, parallel.tp * parallel.cp * parallel.dp // parallel.ep]
    if arch.tied:
        sizes.append(parallel.pp)  # the embedding, on the first and the last stage
    return sum(size > 1 for size in sizes)


def describe_cheapest_fitting_change(
    arch: Architecture,
    config: TrainerConfig,
    gpu_bytes: int,
    update_groups: int = 0,
    frozen: Sequence[Architecture] = (),
    critic: Architecture | None = None,
) -> str:
    """Find the cheapest change with which a rank fits a GPU, as overrides; '' if none does.

    Recomputation costs at most a third of a forward and backward pass, and is tried first; then
    offload to host memory.
    """
    for overrides, changed in _list_thriftier_configs(arch, config):
        total = estimate_trainer_memory(arch, changed, update_groups, frozen, critic).total
        if total <= gpu_bytes:
            return f"{' '.join(overrides)} takes {total / GIB:.1f} GiB"
    return ""


def _list_thriftier_configs(
    arch: Architecture, config: TrainerConfig
) -> Iterator[tuple[list[str], TrainerConfig]]:
    overrides: list[str] = []
    modes_after = {"none": ("selective", "full"), "full": ()}
    for mode in modes_after.get(str(config.recompute), ("full",)):
        config = config.model_copy(update={"recompute": mode})
        overrides = [f"trainer.recompute={mode}"]
        yield overrides, config
    parallel = config.parallel
    if arch.transformers_config and arch.lora is None and parallel.world_size > 1:
        if not parallel.shard_parameters:
            parallel = parallel.model_copy(update={"shard_parameters": True})
            overrides.append("trainer.parallel.shard_parameters=true")
            yield overrides, config.model_copy(update={"parallel": parallel})
        return  # divided state stays on its GPUs
    for key in ("optimizer", "activations"):
        if not getattr(config.offload, key):
            offload = config.offload.model_copy(update={key: True})
            config = config.model_copy(update={"offload": offload})
            overrides.append(f"trainer.offload.{key}=true")
            yield overrides, config
