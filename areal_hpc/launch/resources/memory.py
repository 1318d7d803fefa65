"""Estimates of GPU and host memory, their report in a plan, and what does not fit. Pure.

What follows from shapes is counted. The trainer's part is in `trainer/model/memory_estimate.py`.
SGLang's `--mem-fraction-static` is the share of a GPU for weights and KV cache. Host memory holds a
rank's copy of its part of a checkpoint, which another process writes while training goes on, what
the recipe offloads, and on a CPU what would lie on the GPU. `BASE_BYTES` is what programs take
besides.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.checks.model_files import (
    find_critic_architecture,
    find_frozen_architectures,
    read_recipe_architecture,
)
from areal_hpc.launch.plan import build_job_with_task_per_rank
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.recipe.sections.weights import DEFAULT_MAX_NCCL_GROUPS
from areal_hpc.rundir.rendezvous import format_cell_name
from areal_hpc.slurm.batch_script.script import compute_resources
from areal_hpc.trainer.model.families.architecture import Architecture, divide_layers_over_stages
from areal_hpc.trainer.model.memory_estimate import (
    BYTES_BY_DTYPE,
    GIB,
    PARALLEL_NAMES,
    RESERVE_BYTES,
    TrainerMemory,
    count_critic_parameters,
    count_embedding_parameters,
    count_layer_expert_parameters,
    count_layer_non_expert_parameters,
    count_model_parameters,
    describe_cheapest_fitting_change,
    estimate_checkpoint_copy_bytes,
    estimate_stage_memory,
    estimate_trainer_memory,
)

MIB = 2**20
BASE_BYTES = {
    "trainer": 900 * MIB,
    "ledger": 100 * MIB,
    "inference": 100 * MIB,
    "server": 1400 * MIB,
    "proxy": 250 * MIB,
    "driver": 400 * MIB,
}
"""Resident memory of each process with a tiny model on a CPU. Larger with CUDA, whose libraries
come on top; not measured there, so no recipe is refused for it."""


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes on each GPU of a replica."""

    weights: int
    kv_per_token: int
    kv_tokens: int | None
    """Tokens that the KV cache holds; None if neither the recipe nor the GPU's size says."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_per_token * (self.kv_tokens or 0)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Host memory of a process."""

    job: str
    """`trainer`, or `cell`."""
    process: str
    processes_per_node: int = 1
    fixed_bytes_by_use: dict[str, int] = field(default_factory=dict)
    """Bytes that follow from the recipe's sizes, by what they are for."""
    peak_extra_bytes_by_use: dict[str, int] = field(default_factory=dict)
    """Bytes that are held when a micro-batch, or the KV cache, is as full as the recipe allows."""

    @property
    def bytes_per_process(self) -> int:
        uses = self.fixed_bytes_by_use | self.peak_extra_bytes_by_use
        return BASE_BYTES[self.process] + sum(uses.values())


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


def estimate_host_memory(
    recipe: Recipe, ranks_per_node: int | None = None
) -> tuple[ProcessMemory, ...]:
    """Host memory of each process of the trainer's job and of a cell, the largest rank's for all.

    The SFT stage has the same ranks, before any of these.
    """
    arch = read_recipe_architecture(recipe.model)
    return (
        _estimate_rank_memory(recipe, arch, ranks_per_node or _count_ranks_per_node(recipe)),
        ProcessMemory("trainer", "ledger"),
        ProcessMemory("cell", "inference"),
        _estimate_server_memory(recipe, arch),
        ProcessMemory("cell", "proxy"),
        ProcessMemory("cell", "driver"),
    )


def _estimate_rank_memory(recipe: Recipe, arch: Architecture, ranks_per_node: int) -> ProcessMemory:
    config = recipe.trainer
    frozen = find_frozen_architectures(recipe, arch)
    critic = find_critic_architecture(recipe, arch)
    stages = [
        estimate_stage_memory(arch, config, stage, frozen, critic)
        for stage in range(config.parallel.pp)
    ]
    fixed = {
        "checkpoint": estimate_checkpoint_copy_bytes(arch, config, critic),
        "optimizer": max(one.host_optimizer for one in stages),
        "frozen networks": max(one.host_frozen for one in stages),
    }
    peak_extra = {"activations": max(one.host_activations for one in stages)}
    if config.device == "cpu":
        fixed["state"] = max(one.parameters + one.gradients + one.optimizer for one in stages)
        peak_extra["passes"] = max(one.activations + one.logits for one in stages)
    fixed, peak_extra = (
        {name: size for name, size in uses.items() if size} for uses in (fixed, peak_extra)
    )
    return ProcessMemory("trainer", "trainer", ranks_per_node, fixed, peak_extra)


def _estimate_server_memory(recipe: Recipe, arch: Architecture) -> ProcessMemory:
    config = recipe.inference
    replicas = config.replicas_per_cell
    if config.device != "cpu":
        return ProcessMemory("cell", "server", replicas)
    # Without a GPU's size the cache is as large as the recipe says, or not known.
    memory = estimate_serving_memory(arch, config, None)
    cache = (memory.total - memory.weights) * config.tp
    weights = {"weights": memory.weights * config.tp}
    return ProcessMemory("cell", "server", replicas, weights, {"KV cache": cache} if cache else {})


def _count_ranks_per_node(recipe: Recipe) -> int:
    job = build_job_with_task_per_rank("trainer", recipe, [])
    options = recipe.cluster.slurm.get_options_of_job("trainer")
    try:
        return compute_resources(job, options).tasks_per_node
    except RecipeError:  # `submit` reports it; without Slurm all ranks are on this machine
        return job.tasks


def get_node_bytes_by_job(recipe: Recipe) -> dict[str, int]:
    """Memory that Slurm gives each node of a job (`trainer`, `cell`), where the recipe says so."""
    slurm = recipe.cluster.slurm
    mem_by_job = {
        "trainer": slurm.get_options_of_job("trainer").mem,
        "cell": slurm.get_options_of_job(format_cell_name(0)).mem,
    }
    sizes = {job: parse_slurm_memory_bytes(mem or "0") for job, mem in mem_by_job.items()}
    return {job: size for job, size in sizes.items() if size}


def parse_slurm_memory_bytes(text: str) -> int:
    """Bytes of a size as Slurm takes it, in MiB unless a letter follows; 0 if it is none."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if found is None:
        return 0
    return int(found[1]) << {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[found[2]]


def find_host_memory_problems(
    recipe: Recipe, node_bytes_by_job: Mapping[str, int], ranks_per_node: int | None = None
) -> list[Problem]:
    """Jobs whose sizes in the recipe alone exceed the memory of a node.

    Trainer ranks lie as `cluster.slurm` says, unless it is known how many a node has.
    """
    try:
        processes = estimate_host_memory(recipe, ranks_per_node)
    except RecipeError:  # reported by what needs the model
        return []
    problems = []
    for job, own in _group_by_job(processes):
        needed = sum(sum(one.fixed_bytes_by_use.values()) * one.processes_per_node for one in own)
        if needed <= node_bytes_by_job.get(job, needed):
            continue
        if job == "cell":
            hint = "lower inference.replicas_per_cell, or take nodes with more memory"
        elif recipe.trainer.offload.optimizer:
            hint = "set trainer.offload.optimizer=false, or take nodes with more memory"
        else:
            hint = "more ranks in trainer.parallel, fewer of them a node, or nodes with more memory"
        parts = ", ".join(
            f"{name} {size / GIB:.1f} in each of {one.processes_per_node} {one.process} processes"
            for one in own
            for name, size in one.fixed_bytes_by_use.items()
        )
        is_from_recipe = job in get_node_bytes_by_job(recipe)
        problems.append(
            Problem(
                f"the {job} job needs {needed / GIB:.1f} GiB of host memory a node ({parts}), "
                f"a node has {node_bytes_by_job[job] / GIB:.1f} GiB",
                f"cluster.slurm.jobs.{job}.mem" if is_from_recipe else "trainer",
                hint,
            )
        )
    return problems


def find_allocation_memory_problems(
    recipe: Recipe, environment: Mapping[str, str]
) -> list[Problem]:
    given = parse_slurm_memory_bytes(environment.get("SLURM_MEM_PER_NODE", "0"))
    return find_host_memory_problems(recipe, {"trainer": given, "cell": given}) if given else []


def find_memory_problems(
    trainer: TrainerMemory,
    serving: ServingMemory,
    config: InferenceConfig,
    gpu_bytes: int,
    fitting_change: str = "",
) -> Iterator[Problem]:
    """Parts that will not fit a GPU of `gpu_bytes`; with `fitting_change` the trainer would."""
    if trainer.total > gpu_bytes:
        yield Problem(
            f"a trainer rank of stage {trainer.stage} takes {trainer.total / GIB:.1f} GiB, "
            f"a GPU has {gpu_bytes / GIB:.0f}",
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
    """Lines: memory of each GPU and of each process of a node; warnings of what will not fit."""
    try:
        arch = read_recipe_architecture(recipe.model)
    except RecipeError as error:
        yield f"memory: unknown, because the model cannot be read: {error.problems[0].message}"
        yield f"  try: {error.problems[0].hint}"
        return
    yield from _build_gpu_memory_report(recipe, arch)
    yield ""
    yield from _build_host_memory_report(recipe)


def _build_gpu_memory_report(recipe: Recipe, arch: Architecture) -> Iterator[str]:
    gib = recipe.cluster.gpu_memory_gib
    gpu_bytes = None if gib is None else int(gib * GIB)
    groups = count_weight_update_groups(recipe)
    frozen = find_frozen_architectures(recipe, arch)
    critic = find_critic_architecture(recipe, arch)
    trainer = estimate_trainer_memory(arch, recipe.trainer, groups, frozen, critic)
    serving = estimate_serving_memory(arch, recipe.inference, gpu_bytes)
    of = "" if gib is None else f" of {gib:g}"
    yield f"memory of one GPU in GiB, estimated ({count_model_parameters(arch):,} parameters)"
    yield from _format_trainer_lines(trainer, recipe.trainer.parallel, arch, of)
    if critic is not None:
        parameters = f"{count_critic_parameters(critic):,} parameters"
        yield f"    with a critic of {parameters}, trained after the policy"
    yield from _format_serving_lines(serving, recipe, of)
    if gpu_bytes is None:
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
    """Groups in which trainer rank 0 broadcasts weights, each with a communicator of its own."""
    if recipe.weights.transport == "disk":
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


def _build_host_memory_report(recipe: Recipe) -> Iterator[str]:
    node_bytes = get_node_bytes_by_job(recipe)
    yield "host memory in GiB, estimated"
    for job, own in _group_by_job(estimate_host_memory(recipe)):
        for one in own:
            uses = one.fixed_bytes_by_use | one.peak_extra_bytes_by_use
            parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in uses.items())
            count = f"{one.processes_per_node} x " if one.processes_per_node > 1 else ""
            line = f"  {job:<8} {one.process:<10} {count:>5}{one.bytes_per_process / GIB:8.2f}"
            yield f"{line}  ({parts})" if parts else line
        total = sum(one.bytes_per_process * one.processes_per_node for one in own)
        of = f" of {node_bytes[job] / GIB:.1f}" if job in node_bytes else ""
        yield f"  {job:<8} {'a node':<10} {'':>5}{total / GIB:8.2f}{of}"
        if total > node_bytes.get(job, total):
            yield f"warning: a node of the {job} job may run out of memory"
    for problem in find_host_memory_problems(recipe, node_bytes):
        yield f"warning: {problem}"


def _group_by_job(
    processes: Sequence[ProcessMemory],
) -> list[tuple[str, list[ProcessMemory]]]:
    return [(job, list(own)) for job, own in itertools.groupby(processes, lambda one: one.job)]
