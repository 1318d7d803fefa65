"""Memory table of `areal-hpc plan`: GPU memory per rank, with warnings."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.errors import RecipeError
from areal_hpc.launch.memory import (
    GIB,
    RESERVE_BYTES,
    ServingMemory,
    TrainerMemory,
    count_model_parameters,
    estimate_serving_memory,
    estimate_trainer_memory,
    find_memory_problems,
)
from areal_hpc.launch.tiny_model import build_tiny_config
from areal_hpc.recipe.hub_cache import find_snapshot
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    parse_architecture,
    read_architecture,
)


def render_memory_table(recipe: Recipe) -> Iterator[str]:
    """Lines: per GPU of trainer and serving what it holds, and a warning for what will not fit."""
    try:
        arch = _architecture(recipe)
    except RecipeError as error:
        yield (f"memory: unknown, because the model cannot be read: {error.problems[0].message}")
        yield f"  try: {error.problems[0].hint}"
        return
    gib = recipe.cluster.gpu_memory_gib
    gpu_bytes = None if gib is None else int(gib * GIB)
    trainer = estimate_trainer_memory(arch, recipe.trainer)
    serving = estimate_serving_memory(arch, recipe.inference, gpu_bytes)
    of = "" if gib is None else f" of {gib:g}"
    yield f"memory of one GPU in GiB, estimated ({count_model_parameters(arch):,} parameters)"
    yield from _trainer_lines(trainer, recipe, of)
    yield from _serving_lines(serving, recipe, of)
    if gpu_bytes is None:
        yield "  set cluster.gpu_memory_gib to compare this with your GPUs"
        return
    for problem in find_memory_problems(trainer, serving, recipe.inference, gpu_bytes):
        yield f"warning: {problem}"


def _architecture(recipe: Recipe) -> Architecture:
    model = recipe.model
    if model.tiny is not None:
        return parse_architecture(build_tiny_config(**model.tiny.model_dump()), "model.tiny")
    if model.hub is not None:
        return read_architecture(find_snapshot(model.hub, "model", model.revision, "model.hub"))
    assert model.path is not None
    return read_architecture(model.path)


def _trainer_lines(memory: TrainerMemory, recipe: Recipe, of: str) -> Iterator[str]:
    split = recipe.trainer.parallel
    sizes = " ".join(f"{name}={getattr(split, name)}" for name in ("tp", "pp", "cp", "dp", "ep"))
    yield (
        f"  trainer  {split.world_size} ranks, {sizes}; "
        f"highest use on pipeline stage {memory.stage}"
    )
    for name in ("parameters", "gradients", "optimizer", "activations", "logits"):
        yield f"    {name:<12} {getattr(memory, name) / GIB:8.2f}"
    yield f"    {'reserve':<12} {RESERVE_BYTES / GIB:8.2f}"
    yield f"    {'total':<12} {memory.total / GIB:8.2f}{of}"


def _serving_lines(memory: ServingMemory, recipe: Recipe, of: str) -> Iterator[str]:
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
