"""Checks of a recipe that concern more than one section.

Imports neither torch nor SGLang: a recipe is read and planned on a login node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from areal_hpc.errors import Problem
from areal_hpc.recipe.recipe import Recipe


def _check_tiny_model_sft(recipe: Recipe) -> Iterator[Problem]:
    if recipe.model.tiny is not None and recipe.sft is None:
        yield Problem(
            "a tiny model trains its tokenizer on SFT demonstrations, but the recipe has no "
            "sft section",
            "model.tiny",
            "add an sft section, or set model.path to an existing model",
        )


def _check_batch_divisible(recipe: Recipe) -> Iterator[Problem]:
    trainer = recipe.trainer
    if trainer.batch_size % trainer.minibatches:
        yield Problem(
            (
                f"trainer.batch_size={trainer.batch_size} is not divisible by "
                f"trainer.minibatches={trainer.minibatches}"
            ),
            "trainer.minibatches",
            f"use a divisor of {trainer.batch_size}",
        )
    if trainer.batch_size % trainer.parallel.dp:
        yield Problem(
            (
                f"trainer.batch_size={trainer.batch_size} is not divisible by "
                f"trainer.parallel.dp={trainer.parallel.dp}"
            ),
            "trainer.batch_size",
            f"use a multiple of {trainer.parallel.dp}",
        )


def _check_expert_parallel(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.trainer.parallel
    ranks = parallel.tp * parallel.cp * parallel.dp
    if ranks % parallel.ep:
        yield Problem(
            (
                f"experts cannot be divided over ep={parallel.ep}: each pipeline stage has "
                f"tp x cp x dp = {ranks} ranks"
            ),
            "trainer.parallel.ep",
            f"use a divisor of {ranks}",
        )


def _check_agent_or_online(recipe: Recipe) -> Iterator[Problem]:
    online, key = recipe.rollout.agent.mode == "online", "rollout.workflow"
    if not online and not recipe.rollout.workflow:
        yield Problem("this key is required", key, f"add {key}=... to the recipe")
    if online and recipe.rollout.workflow:
        yield Problem(
            "rollout.workflow must be empty with rollout.agent.mode=online: external programs "
            "run the agent",
            key,
            "leave it out",
        )
    if online and recipe.evaluation.workflow:
        message = (
            "evaluation is not available with rollout.agent.mode=online: "
            "nothing would run the held-out tasks"
        )
        yield Problem(message, "evaluation.workflow", "leave it out")
    if recipe.evaluation.workflow_kwargs and not recipe.evaluation.workflow:
        message = "evaluation.workflow_kwargs is set but evaluation.workflow is not"
        yield Problem(message, "evaluation.workflow_kwargs", "add evaluation.workflow=...")
    if online and recipe.valid_dataset is not None:
        message = "valid_dataset cannot be used with rollout.agent.mode=online"
        yield Problem(
            message, "valid_dataset", "remove valid_dataset; evaluate the exported model instead"
        )


def _check_evaluation_tasks(recipe: Recipe) -> Iterator[Problem]:
    if recipe.evaluation.separate_cell and recipe.valid_dataset is None:
        yield Problem(
            "evaluation.separate_cell=true needs a valid_dataset",
            "evaluation.separate_cell",
            "add a valid_dataset (not available with mode=online) or set "
            "evaluation.separate_cell=false",
        )


def _check_group_size(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.n_samples < 2:
        yield Problem(
            (
                f"rollout.n_samples={recipe.rollout.n_samples}: group-relative advantages compare "
                "the episodes of one task, so at least 2 are needed"
            ),
            "rollout.n_samples",
            "use 2 or more",
        )


def _check_min_samples(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.min_group_size > rollout.n_samples:
        yield Problem(
            f"min_samples={rollout.min_samples} is more than n_samples={rollout.n_samples}",
            "rollout.min_samples",
            f"use {rollout.n_samples} or less",
        )
    if rollout.agent.mode == "online" and rollout.extra_samples:
        yield Problem(
            "rollout.extra_samples cannot be used with mode=online: an external episode cannot "
            "be cancelled",
            "rollout.extra_samples",
            "use 0",
        )


def _check_task_mixing(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.curriculum and any(one.weight != 1 for one in recipe.train_dataset.sources):
        yield Problem(
            "weights of train_dataset.sources are ignored when rollout.curriculum is set",
            "train_dataset.sources",
            "remove the weights, or weight the rows in the curriculum function",
        )


def _check_concurrency(recipe: Recipe) -> Iterator[Problem]:
    episodes = recipe.rollout.episodes_per_ticket
    least = max(recipe.inference.cells, episodes)
    if recipe.rollout.max_concurrent_rollouts < least:
        yield Problem(
            (
                f"rollout.max_concurrent_rollouts={recipe.rollout.max_concurrent_rollouts} is "
                "too small: "
                f"{recipe.inference.cells} cells with groups of {episodes} episodes need at "
                f"least {least}"
            ),
            "rollout.max_concurrent_rollouts",
            f"use {least} or more",
        )


def _check_sampling(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.sampling.temperature <= 0:
        yield Problem(
            "rollout.sampling.temperature=0 makes all episodes of a group identical, so there is "
            "nothing to learn",
            "rollout.sampling.temperature",
            "use 1.0",
        )


def _check_dtypes_match(recipe: Recipe) -> Iterator[Problem]:
    """Replicas prove the checksum of what the trainer sends, so both must hold the same bits."""
    for name in ("device", "dtype"):
        engine, trainer = getattr(recipe.inference, name), getattr(recipe.trainer, name)
        if engine != trainer:
            yield Problem(
                (
                    f"inference.{name}={engine} and trainer.{name}={trainer} differ; "
                    "checksums of weight updates could not match"
                ),
                f"inference.{name}",
                f"use {trainer} for both",
            )


def _check_session_timeout(recipe: Recipe) -> Iterator[Problem]:
    longest_s = recipe.rollout.episode_timeout_s * recipe.rollout.max_episode_tries
    if recipe.proxy.session_timeout_s < longest_s:
        yield Problem(
            (
                f"proxy.session_timeout_s={recipe.proxy.session_timeout_s:.0f} is shorter than "
                f"{recipe.rollout.max_episode_tries} attempts of one episode ({longest_s:.0f} s)"
            ),
            "proxy.session_timeout_s",
            f"use {longest_s:.0f} or more",
        )


CROSS_CHECKS: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    _check_tiny_model_sft,
    _check_batch_divisible,
    _check_expert_parallel,
    _check_agent_or_online,
    _check_evaluation_tasks,
    _check_group_size,
    _check_min_samples,
    _check_task_mixing,
    _check_concurrency,
    _check_sampling,
    _check_dtypes_match,
    _check_session_timeout,
)
"""What no single key can tell: each looks at the whole recipe and reports problems."""
