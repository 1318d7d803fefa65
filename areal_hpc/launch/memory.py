"""Estimate of the GPU memory of trainer and servers, from the model's sizes, and its table.

Counted are the things whose size follows from shapes; kernels' workspace and fragmentation are
covered by `RESERVE_BYTES`, which is an assumption. Sources:

- optimizer state sharded over data-parallel ranks: Megatron-core's distributed optimizer (6 + 12/d
  bytes a parameter in bfloat16; docs/source/api-guide/dist_optimizer.md of Megatron-LM);
- activations: what each operation keeps for its backward pass, counted as in Korthikanti et al.,
  "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), for the
  operations of `trainer/model/`: no dropout, FlashAttention, a gated MLP that keeps its input,
  sequence parallelism whenever tp > 1; what is recomputed is kept of one layer at a time;
- serving: SGLang's `--mem-fraction-static` is the share of a GPU for weights and KV cache.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.checks.model_files import find_architecture
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.trainer import (
    OffloadConfig,
    ParallelConfig,
    RecomputableModule,
    TrainerConfig,
)
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    find_layout_problems,
)

GIB = 2**30
RESERVE_BYTES = 2 * GIB
"""CUDA's context, NCCL's channels, workspace of matrix products. An assumption, not measured."""
BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2}
RECOMPUTE_MODES = ("none", "selective", "full")
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
    host: int = 0
    """Bytes of host memory that offloaded activations of this GPU take."""

    @property
    def total(self) -> int:
        """With the reserve."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.logits + RESERVE_BYTES


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes on each GPU of a replica."""

    weights: int
    kv_per_token: int
    kv_tokens: int | None
    """Tokens that the KV cache holds; None if neither the recipe nor the GPU's size says."""

    @property
    def total(self) -> int:
        """Weights and KV cache."""
        return self.weights + self.kv_per_token * (self.kv_tokens or 0)


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
    """Parameters of one layer's experts on one expert-parallel rank; experts are not cut."""
    if arch.experts is None:
        return 0
    return arch.experts.count // ep * 3 * arch.experts.ffn * arch.hidden


def count_embedding_parameters(arch: Architecture, tp: int) -> int:
    """Parameters of the embedding, or of the head, on one tensor-parallel rank."""
    return -(-arch.vocab // tp) * arch.hidden


def count_stage_parameters(
    arch: Architecture, parallel: ParallelConfig, stage: int
) -> tuple[int, int]:
    """Parameters of one rank of a pipeline stage: those of experts apart, as the second."""
    layers, last = arch.layers // parallel.pp, parallel.pp - 1
    dense = layers * count_layer_non_expert_parameters(arch, parallel.tp)
    if stage == 0:
        dense += count_embedding_parameters(arch, parallel.tp)
    if stage == last:
        dense += arch.hidden
        if not arch.tied or last > 0:  # a tied head of another stage is a copy of the embedding
            dense += count_embedding_parameters(arch, parallel.tp)
    return dense, layers * count_layer_expert_parameters(arch, parallel.ep)


def count_model_parameters(arch: Architecture) -> int:
    """Parameters of the whole network."""
    return sum(count_stage_parameters(arch, ParallelConfig(), 0))


def estimate_trainer_memory(arch: Architecture, config: TrainerConfig) -> TrainerMemory:
    """Memory of the trainer's fullest GPU during a step."""
    stages = {0, config.parallel.pp - 1}
    return max(
        (_estimate_stage_memory(arch, config, stage) for stage in stages), key=lambda m: m.total
    )


def _estimate_stage_memory(arch: Architecture, config: TrainerConfig, stage: int) -> TrainerMemory:
    parallel, element = config.parallel, BYTES_BY_DTYPE[config.dtype]
    dense, experts = count_stage_parameters(arch, parallel, stage)
    # Moments in float32; in bfloat16 also a float32 copy of the parameters.
    state = 8 if config.dtype == "float32" else 12
    sharers = parallel.dp * parallel.cp
    expert_sharers = parallel.tp * sharers // parallel.ep
    tokens = config.max_tokens_per_microbatch
    # 1F1B: stage s has begun pp - s micro-batches before the first of them comes back.
    begun = parallel.pp - stage
    layers = arch.layers // parallel.pp
    kept = count_stage_activations(arch, config, layers, tokens) * element * begun
    # The backward pass has one layer's at a time, however they were kept meanwhile.
    whole = count_layer_activations(arch, parallel, tokens) * element
    is_thrifty = config.recompute != "none" or config.offload.activations
    host = kept if config.offload.activations else 0
    logits = tokens // parallel.cp * (-(-arch.vocab // parallel.tp)) * element
    return TrainerMemory(
        stage=stage,
        parameters=(dense + experts) * element,
        gradients=(dense + experts) * 4,
        optimizer=state * dense // sharers + state * experts // expert_sharers,
        activations=kept - host + whole * is_thrifty,
        logits=logits if stage == parallel.pp - 1 else 0,
        host=host,
    )


def count_stage_activations(
    arch: Architecture, config: TrainerConfig, layers: int, tokens: int
) -> int:
    """Numbers that the `layers` of a stage keep of a micro-batch between forward and backward."""
    activations = config.activations
    recomputed = activations.count_recomputed_layers(layers)
    inputs = recomputed * _count_places(config.parallel, tokens, arch.hidden)
    modules = activations.recompute_modules if activations.recompute == "selective" else ()
    each = count_layer_activations(arch, config.parallel, tokens, modules)
    return inputs + (layers - recomputed) * each


def _count_places(parallel: ParallelConfig, tokens: int, numbers: int) -> int:
    """Numbers of one rank, where each token of a micro-batch has `numbers` over all ranks."""
    return tokens // parallel.cp * numbers // parallel.tp


def count_layer_activations(
    arch: Architecture,
    parallel: ParallelConfig,
    tokens: int,
    recomputed: Collection[RecomputableModule] = (),
) -> int:
    """Numbers that one layer keeps on one rank for the backward pass of a micro-batch.

    The inputs and outputs of both norms; query, key and value as projected and as rotated; what
    was attended; the MLP's gate, up and product. Routing to experts is taken as even. `tokens` are
    those of all context-parallel ranks. Of `recomputed` norms the outputs are not kept,
    of an MLP nothing within.
    """
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    kept = 2 * arch.hidden + (queries + 2 * keys) + (queries + keys) + queries
    if "layernorm" not in recomputed:
        kept += 2 * arch.hidden
    if "mlp" in recomputed:
        pass
    elif arch.experts is None:
        kept += 3 * arch.ffn
    else:  # sent tokens, gate, up and product, and what comes back to be weighed
        kept += arch.experts.per_token * (2 * arch.hidden + 3 * arch.experts.ffn)
    numbers = _count_places(parallel, tokens, kept)
    if parallel.cp > 1:  # keys and values of all ranks, as far as they are attended to
        numbers += 2 * keys * tokens * (2 * parallel.cp + 1) // (2 * parallel.cp) // parallel.tp
    return numbers


def estimate_serving_memory(
    arch: Architecture, config: InferenceConfig, gpu_bytes: int | None
) -> ServingMemory:
    """Memory of each GPU of a replica: its part of the weights, and the KV cache."""
    element = BYTES_BY_DTYPE[config.dtype]
    dense = arch.layers * count_layer_non_expert_parameters(arch, config.tp) + arch.hidden
    tables = (1 if arch.tied else 2) * count_embedding_parameters(arch, config.tp)
    # SGLang cuts every expert over the tensor-parallel ranks.
    experts = arch.layers * count_layer_expert_parameters(arch, 1) // config.tp
    weights = (dense + tables + experts) * element
    heads = max(1, arch.kv_heads // config.tp)  # with more ranks than heads, each is copied
    per_token = 2 * arch.layers * heads * arch.head_dim * element
    tokens = config.max_total_tokens
    if tokens is None and gpu_bytes is not None:
        tokens = max(0, int(gpu_bytes * config.mem_fraction_static) - weights) // per_token
    return ServingMemory(weights, per_token, tokens)


def find_fitting_change(arch: Architecture, config: TrainerConfig, gpu_bytes: int) -> str:
    """The cheapest change with which a trainer rank fits a GPU, in overrides; empty if none does.

    Recomputation costs a third of a forward and backward pass at most, and is tried first; then
    other layouts of the same ranks, with the least communication first.
    """
    for overrides, changed in _list_thriftier_configs(arch, config):
        total = estimate_trainer_memory(arch, changed).total
        if total <= gpu_bytes:
            return f"{overrides} takes {total / GIB:.1f} GiB"
    return ""


def _list_thriftier_configs(
    arch: Architecture, config: TrainerConfig
) -> Iterator[tuple[str, TrainerConfig]]:
    full = config
    for mode in ("selective", "full"):
        if RECOMPUTE_MODES.index(mode) > RECOMPUTE_MODES.index(config.recompute):
            full = config.model_copy(update={"recompute": mode})
            yield f"trainer.recompute={mode}", full
    recompute = "" if full is config else "trainer.recompute=full "
    now = config.parallel
    sizes = [1, 2, 4, 8, 16, 32]
    layouts = [
        now.model_copy(
            update={"tp": tp, "cp": cp, "pp": pp, "dp": now.world_size // (tp * cp * pp)}
        )
        for pp, cp, tp in itertools.product(sizes, sizes, sizes[:4])
        if tp >= now.tp and cp >= now.cp and pp >= now.pp and now.world_size % (tp * cp * pp) == 0
    ]
    for parallel in sorted(layouts, key=lambda one: one.world_size // one.dp):
        if parallel != now and not [*find_layout_problems(arch, parallel)]:
            named = ", ".join(f"{name}: {getattr(parallel, name)}" for name in PARALLEL_NAMES)
            changed = full.model_copy(update={"parallel": parallel})
            yield f"{recompute}trainer.parallel={{{named}}}", changed
    offloading = full.model_copy(update={"offload": OffloadConfig(activations=True)})
    yield f"{recompute}trainer.offload.activations=true", offloading


def find_memory_problems(
    trainer: TrainerMemory,
    serving: ServingMemory,
    config: InferenceConfig,
    gpu_bytes: int,
    fitting_change: str = "",
) -> Iterator[Problem]:
    """Parts that will not fit a GPU of `gpu_bytes`; with `fitting_change` the trainer would."""
    gpu = gpu_bytes / GIB
    if trainer.total > gpu_bytes:
        yield Problem(
            f"a trainer rank of stage {trainer.stage} takes {trainer.total / GIB:.1f} GiB, "
            f"a GPU has {gpu:.0f}",
            "trainer.parallel",
            fitting_change
            or "more ranks, or lower trainer.max_tokens_per_microbatch: "
            f"activations and logits are {(trainer.activations + trainer.logits) / GIB:.1f} GiB",
        )
    room = gpu_bytes * config.mem_fraction_static
    if serving.total > room or not serving.kv_tokens:
        yield Problem(
            f"weights ({serving.weights / GIB:.1f} GiB) and KV cache "
            f"({(serving.total - serving.weights) / GIB:.1f} GiB) exceed the {room / GIB:.1f} GiB "
            f"that mem_fraction_static={config.mem_fraction_static} allows",
            "inference.tp",
            "raise inference.tp, or lower inference.max_total_tokens",
        )
    elif config.context_length is not None and serving.kv_tokens < config.context_length:
        yield Problem(
            f"the KV cache holds {serving.kv_tokens} tokens, less than the "
            f"{config.context_length} of one request",
            "inference.context_length",
            "raise inference.tp or inference.mem_fraction_static, "
            "or lower inference.context_length",
        )


def build_memory_report(recipe: Recipe) -> Iterator[str]:
    """Lines: per GPU of trainer and serving what it holds, and a warning for what will not fit."""
    try:
        arch, source = find_architecture(recipe.model)
    except RecipeError as error:
        yield f"memory: unknown, because the model cannot be read: {error.problems[0].message}"
        yield f"  try: {error.problems[0].hint}"
        return
    gib = recipe.cluster.gpu_memory_gib
    gpu_bytes = None if gib is None else int(gib * GIB)
    trainer = estimate_trainer_memory(arch, recipe.trainer)
    serving = estimate_serving_memory(arch, recipe.inference, gpu_bytes)
    of = "" if gib is None else f" of {gib:g}"
    parameters = f"{count_model_parameters(arch):,} parameters{source}"
    yield f"memory of one GPU in GiB, estimated ({parameters})"
    yield from _format_trainer_lines(trainer, recipe.trainer.parallel, of)
    yield from _format_serving_lines(serving, recipe, of)
    if gpu_bytes is None:
        yield "  set cluster.gpu_memory_gib to compare this with your GPUs"
        return
    change = (
        "" if trainer.total <= gpu_bytes else find_fitting_change(arch, recipe.trainer, gpu_bytes)
    )
    for problem in find_memory_problems(trainer, serving, recipe.inference, gpu_bytes, change):
        yield f"warning: {problem}"


def _format_trainer_lines(memory: TrainerMemory, split: ParallelConfig, of: str) -> Iterator[str]:
    sizes = " ".join(f"{name}={getattr(split, name)}" for name in PARALLEL_NAMES)
    stage = f"highest use on pipeline stage {memory.stage}"
    yield f"  trainer  {split.world_size} ranks, {sizes}; {stage}"
    for name in ("parameters", "gradients", "optimizer", "activations", "logits"):
        yield f"    {name:<12} {getattr(memory, name) / GIB:8.2f}"
    yield f"    {'reserve':<12} {RESERVE_BYTES / GIB:8.2f}"
    yield f"    {'total':<12} {memory.total / GIB:8.2f}{of}"
    if memory.host:
        ranks = min(split.world_size, 8)
        host = memory.host * ranks / GIB
        yield f"    offloaded to the host: {host:.0f} GiB on a node of {ranks} ranks"


def _format_serving_lines(memory: ServingMemory, recipe: Recipe, of: str) -> Iterator[str]:
    config = recipe.inference
    cells = config.cells + recipe.evaluation.separate_cell
    replicas = cells * config.replicas_per_cell
    yield f"  serving  {replicas} replicas of {config.tp} GPUs, in {cells} cells"
    yield f"    {'weights':<12} {memory.weights / GIB:8.2f}"
    if memory.kv_tokens is None:
        yield f"    {'KV cache':<12}     open ({memory.kv_per_token / 1024:.1f} KiB a token)"
        return
    cache = memory.total - memory.weights
    yield f"    {'KV cache':<12} {cache / GIB:8.2f} ({memory.kv_tokens:,} tokens)"
    yield f"    {'total':<12} {memory.total / GIB:8.2f}{of}"
