"""Estimate of the memory that a trainer rank takes, on its GPU and on its node. Pure, no torch.

Counted are the things whose size follows from shapes; CUDA's context, kernels' workspace and
fragmentation are covered by `RESERVE_BYTES`, which is an assumption. Sources:

- optimizer state sharded over data-parallel ranks: Megatron-core's distributed optimizer (6 + 12/d
  bytes a parameter in bfloat16; docs/source/api-guide/dist_optimizer.md of Megatron-LM);
- activations: what each operation keeps for its backward pass, counted as in Korthikanti et al.,
  "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), for the
  operations of this package: no dropout, FlashAttention, a gated MLP that keeps its input,
  sequence parallelism whenever tp > 1; what is recomputed is kept of one layer at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from areal_hpc.recipe.sections.trainer import (
    LoraConfig,
    ParallelConfig,
    TrainerConfig,
)
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    divide_layers_over_stages,
)

GIB = 2**30
RESERVE_BYTES = 2 * GIB
"""CUDA's context, workspace of matrix products. An assumption, not measured."""
COMMUNICATOR_BYTES = 24 * ((4 << 20) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)
"""What NCCL keeps on a GPU for one communicator: 24 channels of a ring, each with the buffers of
three protocols (src/init.cc of NCCL). The number of channels is an
assumption: NCCL takes fewer over slow links, and trees come on top."""
SENT_BUCKET_BYTES = 512 * 2**20
"""Weights that the sender packs at a time, into one of two buffers (`weights/buckets.py`)."""
OPTIMIZER_CHUNK_ELEMENTS = 1 << 24
"""Elements of the optimizer's state that are on the GPU at a time while the rest is in host memory
(`trainer/optimizer.py`): a part of 64 MiB of each master weight and moment."""
BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2}
LOGIT_BYTES = 4
"""From the one that keeps most to the one that keeps least."""
PARALLEL_NAMES = ("tp", "pp", "cp", "dp", "ep")


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on the fullest GPU of the trainer, and the pipeline stage it belongs to."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    communicators: int = 0
    """Buffers of NCCL's communicators; those to replicas, and packed weights, come on top."""
    host_activations: int = 0
    """Bytes of host memory that offloaded activations of this GPU take."""
    host_optimizer: int = 0
    """Bytes of host memory that master weights and moments of this GPU take."""
    scoring: int = 0
    """What the largest frozen network takes while it scores, before there are activations."""
    host_frozen: int = 0
    """Bytes of host memory in which the weights of frozen networks wait."""

    @property
    def total(self) -> int:
        state = self.parameters + self.gradients + self.optimizer
        passes = max(self.activations, self.scoring) + self.logits
        return state + passes + self.communicators + RESERVE_BYTES


def count_layer_non_expert_parameters(arch: Architecture, tp: int) -> int:
    """Parameters of one layer on one tensor-parallel rank, but for those of experts."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    qkv = (queries + 2 * keys) // tp
    count = 2 * arch.hidden + qkv * arch.hidden + queries // tp * arch.hidden
    count += qkv if arch.qkv_bias else 0
    count += 2 * arch.head_dim if arch.qk_norm else 0
    if arch.experts is not None:
        return count + arch.experts.count * arch.hidden  # the router, whole on every rank
    return count + 3 * arch.ffn // tp * arch.hidden


def count_layer_expert_parameters(arch: Architecture, ep: int) -> int:
    if arch.experts is None:
        return 0
    return arch.experts.count // ep * 3 * arch.experts.ffn * arch.hidden


def count_embedding_parameters(arch: Architecture, tp: int) -> int:
    return -(-arch.vocab // tp) * arch.hidden


def count_stage_dense_and_expert_params(
    arch: Architecture, parallel: ParallelConfig, stage: int
) -> tuple[int, int]:
    """Parameters of one rank of a pipeline stage: those of experts apart, as the second."""
    if arch.parameters is not None:
        return arch.parameters.dense, arch.parameters.experts
    layers, last = divide_layers_over_stages(arch.layers, parallel.pp)[stage], parallel.pp - 1
    dense = layers * count_layer_non_expert_parameters(arch, parallel.tp)
    if stage == 0:
        dense += count_embedding_parameters(arch, parallel.tp)
    if stage == last:
        dense += arch.hidden
        if not arch.tied or last > 0:  # a tied head of another stage is a copy of the embedding
            dense += count_embedding_parameters(arch, parallel.tp)
    return dense, layers * count_layer_expert_parameters(arch, parallel.ep)


def count_trained_parameters(
    arch: Architecture, parallel: ParallelConfig, stage: int
) -> tuple[int, int]:
    """The same of those that have gradients and optimizer state."""
    if arch.lora is None:
        return count_stage_dense_and_expert_params(arch, parallel, stage)
    return count_adapter_parameters(arch, arch.lora), 0


def count_adapter_parameters(arch: Architecture, lora: LoraConfig) -> int:
    """Parameters of an adapter on the layers of a plain decoder, under their usual names.

    Of a pattern, or of other names, all of them are counted.
    """
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    experts, width = (
        (1, arch.ffn) if arch.experts is None else (arch.experts.count, arch.experts.ffn)
    )
    rank = lora.rank
    counts = {"q_proj": rank * (arch.hidden + queries), "o_proj": rank * (arch.hidden + queries)}
    counts |= dict.fromkeys(("k_proj", "v_proj"), rank * (arch.hidden + keys))
    layers = ("gate_proj", "up_proj", "down_proj")
    counts |= dict.fromkeys(layers, rank * (arch.hidden + width) * experts)
    targets = lora.target_modules
    named = set() if isinstance(targets, str) else {one.rpartition(".")[2] for one in targets}
    return arch.layers * sum(counts[name] for name in named & counts.keys() or counts)


def count_model_parameters(arch: Architecture) -> int:
    return sum(count_stage_dense_and_expert_params(arch, ParallelConfig(), 0))


def count_critic_parameters(critic: Architecture) -> int:
    return sum(_count_critic_stage_parameters(critic, ParallelConfig(), 0))


def estimate_trainer_memory(
    arch: Architecture,
    config: TrainerConfig,
    update_groups: int = 0,
    frozen: Sequence[Architecture] = (),
    critic: Architecture | None = None,
) -> TrainerMemory:
    """Memory of the trainer's fullest GPU; rank 0 sends weights to `update_groups` groups.

    `frozen` networks score each batch before it is trained; a `critic` is trained beside the
    policy.
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
    return max(stages, key=lambda one: one.total)


def estimate_checkpoint_copy_bytes(
    arch: Architecture, config: TrainerConfig, critic: Architecture | None = None
) -> int:
    """Host memory of a rank's copy of its part of a checkpoint, in bytes: of the fullest stage.

    In bfloat16 weights, float32 master weights and moments; float32 weights are their own masters.
    """
    each, parallel = 12 if config.dtype == "float32" else 14, config.parallel
    undivided = parallel.model_copy(update={"tp": 1, "ep": 1})
    fullest = max(
        sum(count_trained_parameters(arch, undivided, stage))
        + sum(_count_critic_stage_parameters(critic, undivided, stage))
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
    """Memory of a GPU of one pipeline stage during a step."""
    parallel, element = config.parallel, BYTES_BY_DTYPE[config.dtype]
    counts = (
        count_trained_parameters(arch, parallel, stage),
        _count_critic_stage_parameters(critic, parallel, stage),
    )
    dense, experts = (sum(one) for one in zip(*counts, strict=True))
    frozen_parameters = 0
    if arch.lora is not None:
        frozen_parameters = sum(count_stage_dense_and_expert_params(arch, parallel, stage))
    # Moments in float32; in bfloat16 also a float32 copy of the parameters.
    state = 8 if config.dtype == "float32" else 12
    sharers = parallel.dp * parallel.cp
    expert_sharers = parallel.tp * sharers // parallel.ep
    optimizer = state * dense // sharers + state * experts // expert_sharers
    host_optimizer = optimizer if config.offload.optimizer else 0
    tokens = config.max_tokens_per_microbatch
    # 1F1B: stage s has begun pp - s micro-batches before the first of them comes back.
    begun = parallel.pp - stage
    trained = [arch] if critic is None else [arch, critic]  # one after the other
    kept = (
        begun
        * element
        * max(
            count_stage_activation_values(
                one, config, divide_layers_over_stages(one.layers, parallel.pp)[stage], tokens
            )
            for one in trained
        )
    )
    # The backward pass has one layer's at a time, however they were kept meanwhile.
    whole = element * max(count_layer_activation_values(one, parallel, tokens) for one in trained)
    is_thrifty = config.recompute != "none" or config.offload.activations
    host = kept if config.offload.activations else 0
    weights = []
    for network in frozen:
        layout = get_side_layout(network, parallel)
        weights.append(element * sum(count_stage_dense_and_expert_params(network, layout, stage)))
    scoring = [
        held + count_layer_activation_values(one, parallel, tokens) * element
        for one, held in zip(frozen, weights, strict=True)
    ]
    # FSDP2 divides weights and gradients, too, and gathers the tables and a layer at a time.
    rows = sharers if parallel.shard_parameters else 1
    gathered = 0
    if parallel.shard_parameters:
        tables = arch.vocab * arch.hidden * (1 if arch.tied else 2)
        layer = (dense + experts - tables) // arch.layers
        gathered = element * (tables + 2 * layer)
    logits = tokens // parallel.cp * (-(-arch.vocab // parallel.tp)) * LOGIT_BYTES
    return TrainerMemory(
        stage=stage,
        parameters=(dense + experts) * (element if rows == 1 else 4) // rows
        + gathered
        + frozen_parameters * element,
        gradients=(dense + experts) * 4 // rows + gathered,
        optimizer=min(optimizer, state * OPTIMIZER_CHUNK_ELEMENTS) if host_optimizer else optimizer,
        activations=kept - host + whole * is_thrifty,
        logits=logits if stage == parallel.pp - 1 else 0,
        communicators=count_rank_communicators(arch, parallel) * COMMUNICATOR_BYTES,
        host_activations=host,
        host_optimizer=host_optimizer,
        scoring=max(scoring, default=0),
        host_frozen=sum(weights),
    )


def get_side_layout(arch: Architecture, parallel: ParallelConfig) -> ParallelConfig:
    """The layout of a network beside the policy, which FSDP2 never divides."""
    ep = 1 if arch.experts is None else parallel.ep
    return parallel.model_copy(update={"ep": ep, "shard_parameters": False})


def _count_critic_stage_parameters(
    critic: Architecture | None, parallel: ParallelConfig, stage: int
) -> tuple[int, int]:
    if critic is None:
        return 0, 0
    untied = replace(critic, tied=False)
    dense, experts = count_stage_dense_and_expert_params(
        untied, get_side_layout(critic, parallel), stage
    )
    if stage == parallel.pp - 1:
        dense += critic.hidden - count_embedding_parameters(critic, parallel.tp)
    return dense, experts


def count_rank_communicators(arch: Architecture, parallel: ParallelConfig) -> int:
    """NCCL communicators of a trainer rank with the others: of the groups that reduce or send.

    They are made in the first collective of a group; those of a single rank keep no buffers.
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


def count_stage_activation_values(
    arch: Architecture, config: TrainerConfig, layers: int, tokens: int
) -> int:
    """Numbers that the `layers` of a stage keep of a micro-batch between forward and backward."""
    activations = config.activations
    recomputed = activations.count_recomputed_layers(layers)
    inputs = recomputed * _count_values_per_rank(config.parallel, tokens, arch.hidden)
    is_selective = activations.recompute == "selective"
    each = count_layer_activation_values(arch, config.parallel, tokens, is_selective=is_selective)
    return inputs + (layers - recomputed) * each


def _count_values_per_rank(parallel: ParallelConfig, tokens: int, numbers: int) -> int:
    return tokens // parallel.cp * numbers // parallel.tp


def count_layer_activation_values(
    arch: Architecture,
    parallel: ParallelConfig,
    tokens: int,
    *,
    is_selective: bool = False,
) -> int:
    """Numbers that one layer keeps on one rank for the backward pass of a micro-batch.

    The inputs and outputs of both norms; query, key and value as projected and as rotated; what
    was attended; the MLP's gate, up and product. Routing to experts is taken as even. `tokens` are
    those of all context-parallel ranks. Where recomputation is selective, the outputs of norms are
    not kept, nor anything within the MLP.
    """
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    kept = 2 * arch.hidden + (queries + 2 * keys) + (queries + keys) + queries
    if not is_selective:
        kept += 2 * arch.hidden
        if arch.experts is None:
            kept += 3 * arch.ffn
        else:  # sent tokens, gate, up and weighted product
            kept += arch.experts.per_token * (arch.hidden + 3 * arch.experts.ffn)
    numbers = _count_values_per_rank(parallel, tokens, kept)
    if parallel.cp > 1:  # keys and values of all ranks, as far as they are attended to
        numbers += 2 * keys * tokens * (2 * parallel.cp + 1) // (2 * parallel.cp) // parallel.tp
    return numbers


def describe_cheapest_fitting_change(
    arch: Architecture,
    config: TrainerConfig,
    gpu_bytes: int,
    update_groups: int = 0,
    frozen: Sequence[Architecture] = (),
    critic: Architecture | None = None,
) -> str:
    """The cheapest change with which a trainer rank fits a GPU, in overrides; empty if none does.

    Recomputation costs a third of a forward and backward pass at most, and is tried first; then
    what waits in host memory.
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
    more = {"none": ("selective", "full"), "full": ()}
    for mode in more.get(str(config.recompute), ("full",)):
        config = config.model_copy(update={"recompute": mode})
        overrides = [f"trainer.recompute={mode}"]
        yield overrides, config
    parallel = config.parallel
    if arch.transformers_config and arch.lora is None and parallel.world_size > 1:
        if not parallel.shard_parameters:
            parallel = parallel.model_copy(update={"shard_parameters": True})
            overrides.append("trainer.parallel.shard_parameters=true")
            yield overrides, config.model_copy(update={"parallel": parallel})
        return  # what is divided stays on its GPUs
    for key in ("optimizer", "activations"):
        if not getattr(config.offload, key):
            offload = config.offload.model_copy(update={key: True})
            config = config.model_copy(update={"offload": offload})
            overrides.append(f"trainer.offload.{key}=true")
            yield overrides, config
