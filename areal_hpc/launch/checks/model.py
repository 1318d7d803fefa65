"""Checks of the recipe's models: networks, files, tokenizers, and prompts against the context."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_hpc.errors import ChatTemplateError, Problem, RecipeError
from areal_hpc.launch.tiny_model import (
    TINY_MODEL_CONTEXT_TOKENS,
    TinySizes,
    build_tiny_architecture_config,
)
from areal_hpc.proxy.engine.model_call import require_max_position_embeddings
from areal_hpc.recipe.hub_cache import find_snapshot
from areal_hpc.recipe.recipe import ModelConfig, Recipe
from areal_hpc.recipe.sections.trainer import LoraConfig
from areal_hpc.rundir.rendezvous import read_user_key
from areal_hpc.rundir.run_inputs import TaskSet
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    find_layout_problems,
    parse_architecture,
    read_architecture,
)
from areal_hpc.trainer.model.parameter_counts import get_side_layout

SGLANG_FAMILIES_WITHOUT_WINDOW = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
"""Families whose SGLang models attend to all tokens, whatever window `config.json` names."""


def find_model_problems(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.tiny is not None:
        try:
            yield from _find_parallel_size_problems(read_recipe_architecture(recipe), recipe)
        except RecipeError as error:
            yield from error.problems
        context_tokens = recipe.inference.context_length or TINY_MODEL_CONTEXT_TOKENS
        yield from _find_reply_limit_problems(recipe, context_tokens)
    if model.path is not None:
        yield from _find_policy_problems(model.path, "model.path", recipe)
    if model.hub is not None:
        try:
            folder = find_snapshot(model.hub, "model", "model.hub")
        except RecipeError as error:
            yield from error.problems
        else:
            yield from _find_policy_problems(folder, "model.hub", recipe)
    for key, path in (*list_frozen_models(recipe), *_list_critic_models(recipe)):
        if path is not None:
            yield from _find_side_network_problems(path, key, recipe)
    if recipe.sft is not None and recipe.sft.lora is not None:
        with suppress(RecipeError):  # reported already
            arch = read_recipe_architecture(recipe, is_sft=True)
            for problem in find_layout_problems(arch, recipe.trainer.parallel):
                yield replace(problem, message=f"with sft.lora, {problem.message}")
    key_file = recipe.trainer.objective.teacher.api_key_file
    if key_file is not None:
        try:
            read_user_key(key_file, "the teacher's API key")
        except RecipeError as error:
            yield from error.problems


def build_missing_model_problem(path: Path, key: str) -> Problem:
    """Build the problem of a path that is no directory; a path of two parts may be a Hub name."""
    hint = "give a directory in Hugging Face format; jobs never download"
    if path.is_file():
        return Problem(f"{path.resolve()} is a file, expected a model directory", key, hint)
    if len(path.parts) == 2 and not path.is_absolute():
        hint = f"did you mean model.hub={path}? (areal-hpc prefetch downloads it)"
    return Problem(f"there is no model directory at {path.resolve()}", key, hint)


def _read_network(
    path: Path, key: str, recipe: Recipe, problems: list[Problem], lora: LoraConfig | None = None
) -> Architecture | None:
    """Read the network of a model directory; append problems of its files to `problems`."""
    if not path.is_dir():
        problems.append(build_missing_model_problem(path, key))
        return None
    if not list(path.glob("*.safetensors")):
        hint = "give a directory in Hugging Face format"
        problems.append(Problem(f"{path} has no *.safetensors weights", key, hint))
    try:
        arch = read_architecture(path, lora)
    except RecipeError as error:
        problems += error.problems
        return None
    quantization = json.loads((path / "config.json").read_bytes()).get("quantization_config")
    if not quantization:
        return arch
    method = quantization.get("quant_method", "an unnamed method")
    problems.append(
        Problem(
            f"{path / 'config.json'} says that the weights are quantized ({method}); they can be "
            "neither trained nor updated in SGLang, and the trainer would read them without scales",
            key,
            f"use the model's checkpoint in {recipe.trainer.dtype}",
        )
    )
    return None


def _find_policy_problems(path: Path, key: str, recipe: Recipe) -> Iterator[Problem]:
    problems: list[Problem] = []
    arch = _read_network(path, key, recipe, problems, recipe.trainer.lora)
    yield from problems
    if not path.is_dir():
        return
    for name, description in (
        ("tokenizer.json", "the tokenizer"),
        ("tokenizer_config.json", "the tokenizer's settings and chat template"),
    ):
        if not (path / name).is_file():
            hint = "copy the tokenizer files of the base model into the directory"
            yield Problem(f"{path} has no {name} ({description})", key, hint)
    if arch is None:
        return
    yield from _find_family_problems(path, key, arch, recipe)
    yield from _find_parallel_size_problems(arch, recipe)
    try:
        yield from _find_vocabulary_problems(path, key)
        yield from _find_reply_limit_problems(recipe, find_context_tokens(recipe, path))
    except RecipeError as error:
        yield from error.problems


def _find_family_problems(
    path: Path, key: str, arch: Architecture, recipe: Recipe
) -> Iterator[Problem]:
    config = json.loads((path / "config.json").read_bytes())
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and arch.family in SGLANG_FAMILIES_WITHOUT_WINDOW:
        yield Problem(
            f"{path / 'config.json'} has sliding_window {window}, which SGLang does not read for "
            f"{arch.family}: it would sample from another model than the trainer trains",
            key,
            "choose a model without a window; set sliding_window to null if the context never "
            "exceeds it",
        )
    lora = recipe.trainer.lora
    if lora is not None and lora.sync == "adapter" and (arch.experts or arch.has_state_layers):
        yield Problem(
            f"servers adapt the layers of plain decoders alone, and {arch.family} has others",
            "trainer.lora.sync",
            "use trainer.lora.sync=merged",
        )
    if arch.transformers_config and recipe.trainer.objective.has_critic:
        network = arch.family if arch.lora is None else f"{arch.family} with an adapter"
        yield Problem(
            f"a critic has layers of Megatron-core, which {network} has not",
            "trainer.objective.baseline",
            "use another baseline",
        )


def _find_side_network_problems(path: Path, key: str, recipe: Recipe) -> Iterator[Problem]:
    """Find problems of a network beside the policy; it must share the policy's tokenizer."""
    problems: list[Problem] = []
    arch = _read_network(path, key, recipe, problems)
    yield from problems
    if arch is None:
        return
    parallel = get_side_layout(arch, recipe.trainer.parallel)
    for problem in find_layout_problems(arch, parallel):
        yield Problem(f"of {path}: {problem.message}", problem.key, problem.hint)
    policy = _find_model_dir(recipe.model)
    if policy is None:
        return
    policy_tokens, tokens = (_read_tokens(folder) for folder in (policy, path))
    if policy_tokens and policy_tokens != tokens:
        yield Problem(
            f"the tokenizers of {path} and {policy} differ: token ids mean other texts there",
            key,
            "name a model with the policy's tokenizer",
        )


def _find_model_dir(model: ModelConfig) -> Path | None:
    if model.hub is None:
        return model.path
    try:
        return find_snapshot(model.hub, "model", "model.hub")
    except RecipeError:  # reported already
        return None


def _read_tokens(folder: Path) -> dict[str, int]:
    if not (folder / "tokenizer.json").is_file():
        return {}
    return TokenEncoder.from_model_dir(folder).get_base_vocab_ids_by_token()


def _find_vocabulary_problems(path: Path, key: str) -> Iterator[Problem]:
    """Find tokens of the tokenizer without an embedding in the model.

    Special tokens may have none: some models have a padding token that no request contains.
    """
    if not (path / "tokenizer.json").is_file():
        return  # reported already
    encoder = TokenEncoder.from_model_dir(path)
    largest = encoder.list_plain_text_token_ids()[-1]
    if largest >= encoder.vocab_size:
        yield Problem(
            f"the tokenizer in {path} has token ids up to {largest}, but config.json says "
            f"vocab_size {encoder.vocab_size}: it belongs to another model",
            key,
            "copy the tokenizer files of the base model into the directory",
        )


def read_recipe_architecture(recipe: Recipe, *, is_sft: bool = False) -> Architecture:
    """Read the recipe's network; with `is_sft`, or if SFT is all there is, as SFT trains it.

    Raises:
        RecipeError: The model's configuration is not on this machine.
    """
    model, lora = recipe.model, recipe.trainer.lora
    if recipe.sft is not None and (is_sft or recipe.train_dataset is None):
        lora = recipe.sft.lora
    if model.tiny is not None:
        config = build_tiny_architecture_config(TinySizes(**model.tiny.model_dump()))
        return parse_architecture(config, "model.tiny", lora)
    if model.hub is not None:
        return read_architecture(find_snapshot(model.hub, "model", "model.hub"), lora)
    assert model.path is not None
    return read_architecture(model.path, lora)


def list_frozen_models(recipe: Recipe) -> Iterator[tuple[str, Path | None]]:
    """List the recipe keys and paths of frozen networks; None is the policy's initial weights."""
    kl, teacher = recipe.trainer.objective.kl, recipe.trainer.objective.teacher
    if teacher.path is not None:
        yield "trainer.objective.teacher.path", teacher.path
    if kl.coef and not recipe.trainer.reference_is_base:
        yield "trainer.objective.kl.reference", None if kl.reference == "initial" else kl.reference


def find_frozen_architectures(recipe: Recipe, policy: Architecture) -> list[Architecture]:
    """Read the frozen networks; an unreadable one is assumed to equal the policy's."""
    return [_read_architecture_like(path, policy) for _, path in list_frozen_models(recipe)]


def _list_critic_models(recipe: Recipe) -> Iterator[tuple[str, Path | None]]:
    objective = recipe.trainer.objective
    if objective.has_critic:
        path = objective.critic.model if isinstance(objective.critic.model, Path) else None
        yield "trainer.objective.critic.model", path


def find_critic_architecture(recipe: Recipe, policy: Architecture) -> Architecture | None:
    """Read the critic's network, by default the policy's; None if the objective has no critic."""
    critics = [_read_architecture_like(path, policy) for _, path in _list_critic_models(recipe)]
    return critics[0] if critics else None


def _read_architecture_like(path: Path | None, policy: Architecture) -> Architecture:
    try:
        return policy if path is None else read_architecture(path)
    except RecipeError:  # reported by find_model_problems
        return policy


def find_context_tokens(recipe: Recipe, model_dir: Path) -> int:
    """Find the maximum tokens of prompt plus reply: the recipe's limit, else the model's."""
    return recipe.inference.context_length or require_max_position_embeddings(model_dir)


def _find_reply_limit_problems(recipe: Recipe, context_tokens: int) -> Iterator[Problem]:
    samplings = {"rollout.sampling": recipe.rollout.sampling} | {
        held_out.sampling_key: held_out.sampling for held_out in recipe.evaluation_sets
    }
    for key, sampling in samplings.items():
        if sampling.max_new_tokens >= context_tokens:
            yield Problem(
                f"{key}.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in a "
                f"context of {context_tokens} tokens",
                f"{key}.max_new_tokens",
                f"use less than {context_tokens}, or raise inference.context_length",
            )


def _find_parallel_size_problems(arch: Architecture, recipe: Recipe) -> Iterator[Problem]:
    yield from find_layout_problems(arch, recipe.trainer.parallel)
    if arch.heads % recipe.inference.tp:
        yield Problem(
            f"num_attention_heads {arch.heads} must be a multiple of tp {recipe.inference.tp}",
            "inference.tp",
            f"use a divisor of {arch.heads}",
        )


MAX_SAMPLED_PROMPTS = 100
MESSAGES_KEY = "messages"
TOOLS_KEY = "tools"
MAX_CHARS_PER_TOKEN = 32
"""Maximum characters per token of the context; a longer text is too long, and not tokenized."""


def find_prompt_problems(
    recipe: Recipe, model_dir: Path, tasks_file: Path, key: str, context_tokens: int
) -> tuple[list[Problem], list[str]]:
    """Find problems and notes of a data set at `key` whose prompts leave too little room to reply.

    Tasks without `messages` are left out, because their agents write the prompts. The lengths are
    lower bounds, because an agent may extend a prompt.
    """
    tasks = TaskSet.read(tasks_file)
    template = ChatTemplate.from_model_dir(model_dir)
    template.require_messages(with_tools=recipe.inference.tool_call_parser is not None)
    encoder = TokenEncoder.from_model_dir(model_dir)
    lengths: dict[int, int] = {}
    notes: list[str] = []
    has_tools = False
    sampled = min(len(tasks), MAX_SAMPLED_PROMPTS)
    for number in range(sampled):
        index = number * len(tasks) // sampled
        task = tasks[index]
        has_tools = has_tools or bool(task.get(TOOLS_KEY))
        messages = task.get(MESSAGES_KEY)
        if not isinstance(messages, list):
            continue
        try:
            lengths[index] = _count_prompt_tokens(messages, template, encoder, context_tokens)
        except (ChatTemplateError, KeyError, TypeError, AttributeError) as error:
            notes = [f"the chat template does not take the messages of task {index}: {error!r}"]
    if has_tools and recipe.inference.tool_call_parser is None:
        notes.append(
            f"tasks of {key} have {TOOLS_KEY}, and inference.tool_call_parser is not set: requests "
            "with tools will be refused"
        )
    if not lengths:
        return [], notes
    samplings = {held_out.dataset_key: held_out.sampling for held_out in recipe.evaluation_sets}
    max_new_tokens = samplings.get(key, recipe.rollout.sampling).max_new_tokens
    longest = max(lengths, key=lambda index: lengths[index])
    too_long = sum(length >= context_tokens for length in lengths.values())
    may_be_cut = sum(length + max_new_tokens > context_tokens for length in lengths.values())
    prompts = f"of {len(lengths)} prompts of {key}"
    more = " or more" if lengths[longest] == context_tokens else ""
    worst = f"that of task {longest} has {lengths[longest]}{more} tokens"
    if 2 * too_long >= len(lengths):
        message = (
            f"{too_long} {prompts} leave no room for a reply: {worst}, the context has "
            f"{context_tokens}"
        )
        hint = "raise inference.context_length, or shorten the prompts"
        return [Problem(message, key, hint)], notes
    if too_long:
        notes.append(
            f"{too_long} {prompts} leave no room for a reply in {context_tokens} tokens: {worst}"
        )
    if may_be_cut > too_long:
        notes.append(
            f"{may_be_cut} {prompts} leave less room in {context_tokens} tokens than "
            f"max_new_tokens={max_new_tokens}: {worst}"
        )
    return [], notes


def _count_prompt_tokens(
    messages: list[Any], template: ChatTemplate, encoder: TokenEncoder, context_tokens: int
) -> int:
    text = template.render_prompt([normalize_chat_message(message) for message in messages])
    if len(text) > context_tokens * MAX_CHARS_PER_TOKEN:
        return context_tokens
    return len(encoder.encode(text))
