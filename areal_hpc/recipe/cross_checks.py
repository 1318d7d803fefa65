"""Checks of a recipe that concern more than one section.

Imports neither torch nor SGLang: a recipe is read and planned on a login node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from areal_hpc.errors import Problem
from areal_hpc.recipe.recipe import Recipe


def check_tiny_model_sft(recipe: Recipe) -> Iterator[Problem]:
    if recipe.model.tiny is not None and recipe.sft is None:
        yield Problem(
            "a tiny model learns its tokenizer from the demonstrations, and there are none",
            "model.tiny",
            "add a sft section, or name a model directory in model.path",
        )


def check_batch_divisible(recipe: Recipe) -> Iterator[Problem]:
    trainer = recipe.trainer
    if trainer.batch_size % trainer.minibatches:
        yield Problem(
            f"batch_size={trainer.batch_size} tickets do not divide into "
            f"minibatches={trainer.minibatches} equal parts",
            "trainer.minibatches",
            f"use a divisor of {trainer.batch_size}",
        )
    if trainer.batch_size % trainer.parallel.dp:
        yield Problem(
            f"batch_size={trainer.batch_size} tickets do not divide over "
            f"dp={trainer.parallel.dp} data-parallel ranks",
            "trainer.batch_size",
            f"use a multiple of {trainer.parallel.dp}",
        )


def check_expert_parallel(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.trainer.parallel
    ranks = parallel.tp * parallel.cp * parallel.dp
    if ranks % parallel.ep:
        yield Problem(
            f"experts cannot be spread over ep={parallel.ep} of the {ranks} ranks that "
            "tp x cp x dp gives each pipeline stage",
            "trainer.parallel.ep",
            f"use a divisor of {ranks}",
        )


def check_agent_or_online(recipe: Recipe) -> Iterator[Problem]:
    online, key = recipe.rollout.agent.mode == "online", "rollout.workflow"
    if not online and not recipe.rollout.workflow:
        yield Problem("this key is required", key, f"add {key}=... to the recipe")
    if online and recipe.rollout.workflow:
        yield Problem("in mode online no agent of the run's own is run", key, "leave it out")
    if online and recipe.evaluation.workflow:
        message = "in mode online nobody plays held-out tasks"
        yield Problem(message, "evaluation.workflow", "leave it out")
    if recipe.evaluation.workflow_kwargs and not recipe.evaluation.workflow:
        message = "arguments of an agent that is not named"
        yield Problem(message, "evaluation.workflow_kwargs", "add evaluation.workflow=...")
    if online and recipe.valid_dataset is not None:
        message = "in mode online nobody plays held-out tasks"
        yield Problem(message, "valid_dataset", "leave it out, and evaluate the export")


def check_evaluation_tasks(recipe: Recipe) -> Iterator[Problem]:
    if recipe.evaluation.separate_cell and recipe.valid_dataset is None:
        yield Problem(
            "there are no held-out tasks that a job of its own could play",
            "evaluation.separate_cell",
            "add a valid_dataset (which mode online cannot have), or use false",
        )


def check_group_size(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.n_samples < 2:
        yield Problem(
            f"n_samples={recipe.rollout.n_samples}: group-relative advantages compare episodes "
            "of one task, so one episode teaches nothing",
            "rollout.n_samples",
            "use 2 or more",
        )


def check_min_samples(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.min_group_size > rollout.n_samples:
        yield Problem(
            f"min_samples={rollout.min_samples} is more than n_samples={rollout.n_samples}",
            "rollout.min_samples",
            f"use {rollout.n_samples} or less",
        )
    if rollout.agent.mode == "online" and rollout.extra_samples:
        yield Problem(
            "in mode online a program that came cannot be sent away",
            "rollout.extra_samples",
            "use 0",
        )


def check_task_mixing(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.curriculum and any(one.weight != 1 for one in recipe.train_dataset.sources):
        yield Problem(
            "rollout.curriculum weighs every task, so the weights of sources have no say",
            "train_dataset.sources",
            "leave the weights out, and have the curriculum weigh the rows",
        )


def check_concurrency(recipe: Recipe) -> Iterator[Problem]:
    episodes = recipe.rollout.episodes_per_ticket
    least = max(recipe.inference.cells, episodes)
    if recipe.rollout.max_concurrent_rollouts < least:
        yield Problem(
            f"max_concurrent_rollouts={recipe.rollout.max_concurrent_rollouts} is less than "
            f"the {least} that {recipe.inference.cells} cells and groups of "
            f"{episodes} need",
            "rollout.max_concurrent_rollouts",
            f"use {least} or more",
        )


def check_sampling(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.sampling.temperature <= 0:
        yield Problem(
            "temperature=0 makes every episode of a group the same, so nothing can be learnt",
            "rollout.sampling.temperature",
            "use 1.0",
        )


def check_dtypes_match(recipe: Recipe) -> Iterator[Problem]:
    """Replicas prove the checksum of what the trainer sends, so both must hold the same bits."""
    for name in ("device", "dtype"):
        engine, trainer = getattr(recipe.inference, name), getattr(recipe.trainer, name)
        if engine != trainer:
            yield Problem(
                f"inference.{name}={engine} and trainer.{name}={trainer} differ, so no update "
                "could be verified",
                f"inference.{name}",
                f"use {trainer} for both",
            )


def check_session_timeout(recipe: Recipe) -> Iterator[Problem]:
    longest_s = recipe.rollout.episode_timeout_s * recipe.rollout.max_episode_tries
    if recipe.proxy.session_timeout_s < longest_s:
        yield Problem(
            f"session_timeout_s={recipe.proxy.session_timeout_s:.0f} is less than the "
            f"{longest_s:.0f} s that {recipe.rollout.max_episode_tries} tries of an episode take",
            "proxy.session_timeout_s",
            f"use {longest_s:.0f} or more",
        )


CROSS_CHECKS: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    check_tiny_model_sft,
    check_batch_divisible,
    check_expert_parallel,
    check_agent_or_online,
    check_evaluation_tasks,
    check_group_size,
    check_min_samples,
    check_task_mixing,
    check_concurrency,
    check_sampling,
    check_dtypes_match,
    check_session_timeout,
)
"""What no single key can tell: each looks at the whole recipe and reports problems."""
