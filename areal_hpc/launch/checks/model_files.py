"""The recipe's model: its network, and checks of its files, its tokenizer, the context length."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.tiny_model import TINY_MODEL_CONTEXT_TOKENS, build_tiny_config
from areal_hpc.proxy.engine.model_call import read_max_context_tokens
from areal_hpc.recipe.hub_cache import find_snapshot
from areal_hpc.recipe.recipe import ModelConfig, Recipe
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    find_layout_problems,
    parse_architecture,
    read_architecture,
)
from areal_hpc.trainer.model.families.known_models import find_known_config


def check_model(recipe: Recipe) -> Iterator[Problem]:
    """Problems of the recipe's model, where it lies now."""
    model = recipe.model
    if model.tiny is not None:
        yield from _check_parallel_sizes(build_tiny_config(model.tiny), "model.tiny", recipe)
        most = recipe.inference.context_length or TINY_MODEL_CONTEXT_TOKENS
        yield from _check_reply_limits(recipe, most)
    if model.path is not None:
        yield from _check_model_directory(model.path, "model.path", recipe)
    if model.hub is not None:
        try:
            folder = find_snapshot(model.hub, "model", model.revision, "model.hub")
        except RecipeError as error:
            yield from error.problems
        else:
            yield from _check_model_directory(folder, "model.hub", recipe)


def _check_model_directory(path: Path, key: str, recipe: Recipe) -> Iterator[Problem]:
    if not path.is_dir():
        found = f"there is no model directory at {path.resolve()}"
        if path.is_file():
            found = f"{path.resolve()} is a file, expected a model directory"
        yield Problem(found, key, "give a directory in Hugging Face format; jobs never download")
        return
    for name, what in (
        ("config.json", "the model's shape"),
        ("tokenizer.json", "the tokenizer"),
        ("tokenizer_config.json", "the tokenizer's settings and chat template"),
    ):
        if not (path / name).is_file():
            yield Problem(
                f"{path} has no {name} ({what})",
                key,
                "copy the tokenizer files of the base model into the directory"
                if "tokenizer" in name
                else "give a directory in Hugging Face format",
            )
    if not list(path.glob("*.safetensors")):
        yield Problem(f"{path} has no *.safetensors weights", key)
    where = path / "config.json"
    if not where.is_file():
        return
    try:
        config = json.loads(where.read_bytes())
    except ValueError as error:
        yield Problem(f"{where} is not JSON: {error}", key, "copy the model again")
        return
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unnamed method")
        yield Problem(
            f"{where} says that the weights are quantized ({method}); they can be neither trained "
            "nor updated in SGLang",
            key,
            f"use the model's checkpoint in {recipe.trainer.dtype}",
        )
        return
    yield from _check_parallel_sizes(config, str(where), recipe)
    try:
        yield from _check_vocabulary(path, key)
        yield from _check_reply_limits(recipe, find_context_tokens(recipe, path))
    except RecipeError as error:
        yield from error.problems


def _check_vocabulary(path: Path, key: str) -> Iterator[Problem]:
    """Has the model an embedding for every token of its tokenizer?

    Special tokens may lie beyond it: some models have a padding token that nothing sends.
    """
    if not (path / "tokenizer.json").is_file():
        return  # told already
    encoder = TokenEncoder.from_model_dir(path)
    largest = encoder.list_text_ids()[-1]
    if largest >= encoder.vocab_size:
        yield Problem(
            f"the tokenizer in {path} has token ids up to {largest}, but config.json says "
            f"vocab_size {encoder.vocab_size}: it belongs to another model",
            key,
            "copy the tokenizer files of the base model into the directory",
        )


def find_architecture(model: ModelConfig) -> tuple[Architecture, str]:
    """The recipe's network, and a remark on where it is known from unless it lies here.

    Raises:
        RecipeError: Its configuration is not here, and it is none of the well-known models.
    """
    if model.tiny is not None:
        return parse_architecture(build_tiny_config(model.tiny), "model.tiny"), ""
    if model.hub is None:
        assert model.path is not None
        return read_architecture(model.path), ""
    try:
        folder = find_snapshot(model.hub, "model", model.revision, "model.hub")
    except RecipeError:
        known = find_known_config(model.hub)
        if known is None:
            raise
        remark = "; sizes from our table: the model is not in the cache"
        return parse_architecture(known, "model.hub"), remark
    return read_architecture(folder), ""


def find_context_tokens(recipe: Recipe, model_dir: Path) -> int:
    """Longest prompt plus reply: the recipe's, else the model's.

    Raises:
        RecipeError: Neither says.
    """
    return recipe.inference.context_length or read_max_context_tokens(model_dir)


def _check_reply_limits(recipe: Recipe, context_tokens: int) -> Iterator[Problem]:
    """Does the longest reply leave room for a prompt?"""
    samplings = {"rollout.sampling": recipe.rollout.sampling} | {
        one.sampling_key: one.sampling for one in recipe.evaluation_sets
    }
    for key, sampling in samplings.items():
        if sampling.max_new_tokens >= context_tokens:
            yield Problem(
                f"{key}.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in a "
                f"context of {context_tokens} tokens",
                f"{key}.max_new_tokens",
                f"use less than {context_tokens}, or raise inference.context_length",
            )


def _check_parallel_sizes(
    config: Mapping[str, Any], where: str, recipe: Recipe
) -> Iterator[Problem]:
    """Is it a network that can be trained, and does it split as the recipe asks?"""
    try:
        arch = parse_architecture(config, where)
    except RecipeError as error:
        yield from error.problems
        return
    yield from find_layout_problems(arch, recipe.trainer.parallel)
    if arch.heads % recipe.inference.tp:
        yield Problem(
            f"num_attention_heads {arch.heads} must be a multiple of tp {recipe.inference.tp}",
            "inference.tp",
            f"use a divisor of {arch.heads}",
        )
