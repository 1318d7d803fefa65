"""Estimates of GPU memory, and of the processors and memory that jobs request on nodes. Pure.

Memory that follows from tensor shapes is counted; `trainer/model/memory_estimate.py` counts the
trainer's. SGLang's `--mem-fraction-static` is the share of a GPU for weights and KV cache.

By default Slurm gives a task one CPU, and a job the site's default memory for its CPUs. On one core
the nine processes of a cell are slow, and Slurm kills the trainer at its first checkpoint. The
constants of nodes are generous assumptions, because the needs of agents are unknown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.checks.model import (
    find_critic_architecture,
    find_frozen_architectures,
    read_recipe_architecture,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import JobKind, JobOptions, SlurmConfig, get_job_kind
from areal_hpc.recipe.sections.inference import DEFAULT_MAX_NCCL_GROUPS, InferenceConfig
from areal_hpc.recipe.sections.trainer import Dtype, ParallelConfig
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.slurm.batch_script import MEMORY_FLAGS, compute_resources
from areal_hpc.trainer.model.activation_memory import BYTES_BY_DTYPE
from areal_hpc.trainer.model.families.architecture import Architecture, divide_layers_over_stages
from areal_hpc.trainer.model.memory_estimate import (
    GIB,
    PARALLEL_NAMES,
    RESERVE_BYTES,
    TrainerMemory,
    describe_cheapest_fitting_change,
    estimate_checkpoint_copy_bytes,
    estimate_trainer_memory,
)
from areal_hpc.trainer.model.parameter_counts import (
    count_adapter_parameters,
    count_critic_parameters,
    count_embedding_parameters,
    count_layer_expert_parameters,
    count_layer_non_expert_parameters,
    count_model_parameters,
)


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes on each GPU of a replica."""

    weights: int
    kv_per_token: int
    kv_tokens: int | None
    """Tokens that fit the KV cache; None if neither the recipe nor the GPU's size is given."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_per_token * (self.kv_tokens or 0)


def estimate_serving_memory(
    arch: Architecture, config: InferenceConfig, dtype: Dtype, gpu_bytes: int | None
) -> ServingMemory:
    """Estimate the memory of each GPU of a replica: its part of the weights, and the KV cache."""
    element = BYTES_BY_DTYPE[dtype]
    layers = range(arch.layers)
    dense = sum(count_layer_non_expert_parameters(arch, layer, config.tp) for layer in layers)
    tables = (1 if arch.tied else 2) * count_embedding_parameters(arch, config.tp)
    # SGLang splits every expert over the tensor-parallel ranks.
    experts = sum(count_layer_expert_parameters(arch, layer, 1) for layer in layers) // config.tp
    weights = (dense + arch.hidden + tables + experts) * element
    heads = max(1, arch.kv_heads // config.tp)  # with more ranks than heads, each is copied
    per_token = 2 * arch.layers * heads * arch.head_dim * element
    tokens = config.max_total_tokens
    if tokens is None and gpu_bytes is not None:
        tokens = max(0, int(gpu_bytes * config.mem_fraction_static) - weights) // per_token
    return ServingMemory(weights, per_token, tokens)


def find_memory_problems(
    trainer: TrainerMemory,
    serving: ServingMemory,
    config: InferenceConfig,
    gpu_bytes: int,
    fitting_change: str = "",
) -> Iterator[Problem]:
    """Find the parts too large for a GPU of `gpu_bytes`; the trainer fits with `fitting_change`."""
    if trainer.total > gpu_bytes:
        yield Problem(
            f"a trainer rank of stage {trainer.stage} takes {trainer.total / GIB:.1f} GiB, "
            f"a GPU has {gpu_bytes / GIB:.0f}",
            "trainer.parallel",
            fitting_change
            or "more ranks, or lower trainer.max_tokens_per_microbatch: "
            f"activations and logits are {(trainer.activations + trainer.logits) / GIB:.1f} GiB",
        )
    limit = gpu_bytes * config.mem_fraction_static
    if serving.total > limit or not serving.kv_tokens:
        yield Problem(
            f"weights ({serving.weights / GIB:.1f} GiB) and KV cache "
            f"({(serving.total - serving.weights) / GIB:.1f} GiB) exceed the {limit / GIB:.1f} GiB "
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
    """Report, line by line, a process's memory by its uses; warn of parts that fit no GPU."""
    try:
        arch = read_recipe_architecture(recipe)
    except RecipeError as error:
        yield f"memory: unknown, because the model cannot be read: {error.problems[0].message}"
        yield f"  try: {error.problems[0].hint}"
        return
    yield from _build_gpu_memory_report(recipe, arch)


def _build_gpu_memory_report(recipe: Recipe, arch: Architecture) -> Iterator[str]:
    gib = recipe.cluster.gpu_memory_gib
    gpu_bytes = None if gib is None else int(gib * GIB)
    groups = count_weight_update_groups(recipe)
    frozen = find_frozen_architectures(recipe, arch)
    critic = find_critic_architecture(recipe, arch)
    lora = arch.lora
    trainer = estimate_trainer_memory(arch, recipe.trainer, groups, frozen, critic)
    if recipe.sft is not None and lora is not None:
        sft_arch = read_recipe_architecture(recipe, is_sft=True)
        memory = estimate_trainer_memory(sft_arch, recipe.trainer)
        if memory.total > trainer.total:
            arch, trainer = sft_arch, memory
    serving = estimate_serving_memory(arch, recipe.inference, recipe.trainer.dtype, gpu_bytes)
    gpu_size = "" if gib is None else f" of {gib:g}"
    needs_gpus = recipe.trainer.device != "cpu"
    whose = "one GPU" if needs_gpus else "a process on the CPU"
    yield f"memory of {whose} in GiB, estimated ({count_model_parameters(arch):,} parameters)"
    network = arch.family
    if lora is not None:
        network += " with an adapter"
        yield f"  an adapter of {count_adapter_parameters(arch, lora):,} parameters is trained"
    if arch.transformers_config:
        yield f"  {network} has layers of transformers, which tp, pp and ep do not divide"
    yield from _format_trainer_lines(trainer, recipe.trainer.parallel, arch, gpu_size)
    if critic is not None:
        parameters = f"{count_critic_parameters(critic):,} parameters"
        yield f"    with a critic of {parameters}, trained after the policy"
    yield from _format_serving_lines(serving, recipe, gpu_size)
    if gpu_bytes is None:
        if needs_gpus:
            yield "  set cluster.gpu_memory_gib to compare this with your GPUs"
        return
    change = ""
    if trainer.total > gpu_bytes:
        change = describe_cheapest_fitting_change(
            arch, recipe.trainer, gpu_bytes, groups, frozen, critic
        )
    for problem in find_memory_problems(trainer, serving, recipe.inference, gpu_bytes, change):
        yield f"warning: {problem}"


def count_weight_update_groups(recipe: Recipe) -> int:
    """Count the groups, each with a communicator, in which trainer rank 0 broadcasts weights."""
    if recipe.weights.goes_by_files:
        return 0
    cells = recipe.inference.cells + recipe.evaluation.separate_cell
    replicas = cells * recipe.inference.replicas_per_cell
    size = recipe.weights.replicas_per_group
    return min(replicas, DEFAULT_MAX_NCCL_GROUPS) if size is None else -(-replicas // size)


def _format_trainer_lines(
    memory: TrainerMemory, parallel: ParallelConfig, arch: Architecture, gpu_size_text: str
) -> Iterator[str]:
    sizes = " ".join(f"{name}={getattr(parallel, name)}" for name in PARALLEL_NAMES)
    stage = f"highest use on pipeline stage {memory.stage}"
    yield f"  trainer  {parallel.world_size} ranks, {sizes}; {stage}"
    if arch.layers % parallel.pp:
        layers = " + ".join(map(str, divide_layers_over_stages(arch.layers, parallel.pp)))
        yield f"    {arch.layers} layers on {parallel.pp} stages: {layers}"
    for name in (
        "parameters", "gradients", "optimizer", "activations", "logits", "communicators"
    ):  # fmt: skip
        yield _format_line(name, getattr(memory, name))
    if memory.scoring:
        yield _format_line("scoring", max(0, memory.scoring - memory.activations)) + (
            " beyond activations, which come later: a frozen network takes "
            f"{memory.scoring / GIB:.2f}"
        )
    yield _format_line("reserve", RESERVE_BYTES)
    yield _format_line("total", memory.total) + gpu_size_text


def _format_serving_lines(
    memory: ServingMemory, recipe: Recipe, gpu_size_text: str
) -> Iterator[str]:
    config = recipe.inference
    cells = config.cells + recipe.evaluation.separate_cell
    replicas = cells * config.replicas_per_cell
    yield f"  serving  {replicas} replicas of {config.tp} GPUs, in {cells} cells"
    yield _format_line("weights", memory.weights)
    if memory.kv_tokens is None:
        yield f"    {'KV cache':<13}     open ({memory.kv_per_token / 1024:.1f} KiB a token)"
        return
    yield (
        _format_line("KV cache", memory.total - memory.weights) + f" ({memory.kv_tokens:,} tokens)"
    )
    yield _format_line("total", memory.total) + gpu_size_text


def _format_line(name: str, size_bytes: int) -> str:
    return f"    {name:<13} {size_bytes / GIB:8.2f}"


CPUS_PER_RANK = 4
"""CPUs for a trainer rank's Python, autograd's thread, NCCL's, and its checkpoint's writer."""
CPUS_PER_SERVER_GPU = 4
"""CPUs for a replica's scheduler, which spins, its tokenizers, and the compiler of kernels."""
CPUS_PER_CELL_NODE = 4
"""CPUs for proxy, control proxy and driver, and one for the agents."""
HOST_BYTES_PER_GPU_PROCESS = 8 * GIB
"""Memory of a process for CUDA's libraries, pinned buffers and its weights while they load."""
HOST_BYTES_FOR_CPU_PROCESSES = 8 * GIB
"""Memory of all processes of a node that use no GPU: ledger, or proxy, driver and agents."""
_CPU_FLAGS = {"cpus-per-task", "cpus-per-gpu", "cores-per-socket"}


def add_node_share_options(recipe: Recipe, jobs: Sequence[JobSpec]) -> SlurmConfig:
    """Add `cpus-per-task` and `mem` to the Slurm options of jobs with GPUs, unless they are set.

    Jobs with `exclusive` nodes get all resources of these.

    Raises:
        RecipeError: The memory of a job cannot be estimated, or jobs do not fit the nodes.
    """
    slurm = recipe.cluster.slurm
    problems: list[Problem] = []
    completed: dict[JobKind, JobOptions] = {}
    for job in jobs:
        kind = get_job_kind(job.name)
        if kind in completed or not job.gpus_per_task:
            continue
        options = slurm.get_options_of_job(job.name)
        try:
            derived = _derive_node_share(recipe, job, kind, options)
        except RecipeError as error:
            problems += [problem for problem in error.problems if problem not in problems]
            continue
        if derived:
            own = slurm.jobs.get(kind, JobOptions())
            completed[kind] = own.model_copy(update={"sbatch": {**own.sbatch, **derived}})
    if problems:
        raise RecipeError.from_problems(problems)
    return slurm.model_copy(update={"jobs": {**slurm.jobs, **completed}})


def _derive_node_share(
    recipe: Recipe, job: JobSpec, kind: JobKind, options: JobOptions
) -> dict[str, int | str]:
    flags = options.sbatch.keys()
    if "exclusive" in flags:
        return {}
    derived: dict[str, int | str] = {}
    if not flags & _CPU_FLAGS:
        derived["cpus-per-task"] = (
            job.gpus_per_task * CPUS_PER_SERVER_GPU + CPUS_PER_CELL_NODE
            if job.is_task_a_node
            else CPUS_PER_RANK
        )
    if not flags & MEMORY_FLAGS:
        tasks_per_node = compute_resources(job, options).tasks_per_node
        size = (
            tasks_per_node * job.gpus_per_task * HOST_BYTES_PER_GPU_PROCESS
            + HOST_BYTES_FOR_CPU_PROCESSES
        )
        if not job.is_task_a_node:
            size += _estimate_trainer_bytes(recipe, tasks_per_node, kind)
        derived["mem"] = f"{-(-size // GIB)}G"
    return derived


def _estimate_trainer_bytes(recipe: Recipe, tasks_per_node: int, kind: str) -> int:
    try:
        arch = read_recipe_architecture(recipe)
    except RecipeError as error:
        raise RecipeError(
            f"the memory that the {kind} job needs on a node is not known: "
            f"{error.problems[0].message}",
            key=f"cluster.slurm.jobs.{kind}.sbatch.mem",
            hint=f"{error.problems[0].hint}; or set it (as in 200G)",
        ) from error
    frozen = find_frozen_architectures(recipe, arch)
    critic = find_critic_architecture(recipe, arch)
    needs_bytes = [_estimate_host_bytes(arch, recipe, frozen, critic)]
    if recipe.sft is not None and arch.lora is not None:
        sft_arch = read_recipe_architecture(recipe, is_sft=True)
        needs_bytes.append(_estimate_host_bytes(sft_arch, recipe))
    return tasks_per_node * max(needs_bytes)


def _estimate_host_bytes(
    arch: Architecture,
    recipe: Recipe,
    frozen: Sequence[Architecture] = (),
    critic: Architecture | None = None,
) -> int:
    memory = estimate_trainer_memory(arch, recipe.trainer, frozen=frozen, critic=critic)
    offloaded = memory.host_activations + memory.host_optimizer + memory.host_frozen
    return estimate_checkpoint_copy_bytes(arch, recipe.trainer, critic) + offloaded
