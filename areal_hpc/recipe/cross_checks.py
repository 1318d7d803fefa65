"""Checks of a recipe that concern more than one section.

Imports neither torch nor SGLang: a recipe is read and planned on a login node.
"""

from collections.abc import Iterator, Mapping, Sequence

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.evaluation.set_metrics import resolve_k
from areal_hpc.evaluation.set_names import VALIDATION_SET_NAME
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.evaluation import resolve_keep_best
from areal_hpc.recipe.sections.objective import (
    GROUP_SETTINGS,
    RATIO_SETTINGS,
    ObjectiveConfig,
)
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.sections.sandbox import SandboxConfig
from areal_hpc.recipe.source_objectives import list_trained_settings, resolve_source_objectives
from areal_hpc.wire.proxy import MAX_MASK_TOKENS_PER_POSITION
from areal_hpc.wire.trajectory import GREEDY_TEMPERATURE_BOUND

JUNK_SCORES = {
    "game_of_life_halting": 1.0,
    "coin_flip": 0.96,
    "polynomial_equations": 0.37,
    "rectangle_count": 0.25,
    "acre": 0.18,
    "syllogism": 0.15,
}
"""Mean scores that reasoning-gym's own scorers give, on all tasks of a set, to the same reply 0, 1
or None, which answers nothing (version 0.1.25, a hundred tasks of each)."""
SMALLEST_DECAY_OF_A_STEP = 2.0**-25
"""Share of a weight below which decay has no effect, as 1 less a smaller share is 1 in float32."""


def find_conflicts(recipe: Recipe) -> Iterator[Problem]:
    """Find values that do not fit together."""
    objectives: list[ObjectiveConfig] = []
    try:
        objectives = resolve_source_objectives(recipe)
    except RecipeError as error:
        yield from error.problems
    yield from _find_training_conflicts(recipe, objectives)
    yield from _find_episode_problems(recipe)
    yield from _find_online_conflicts(recipe)
    yield from _find_rollout_conflicts(recipe, objectives)
    yield from _find_sandbox_conflicts(recipe)
    yield from _find_served_teacher_conflicts(recipe)
    yield from _find_serving_conflicts(recipe)


def find_likely_mistakes(recipe: Recipe) -> Iterator[str]:
    """Find valid but suspicious settings, and yield a warning for each."""
    for item in recipe.evaluation_sets:
        key = f"evaluation.sets.{item.name}"
        if item.n_samples > 1 and item.sampling.temperature == 0:
            yield (
                f"{key} plays each task {item.n_samples} times at temperature 0, and all samples "
                f"come out alike; set {key}.sampling"
            )
    for source, key in recipe.train_sources:
        is_reasoning_gym = (source.generator or "").endswith(":make_reasoning_tasks")
        name = str(source.kwargs.get("name"))
        if is_reasoning_gym and (score := JUNK_SCORES.get(name)):
            yield (
                f"{key}.kwargs.name={name}: its own scorer gives {score} to a reply that answers "
                "nothing, and the policy will learn such replies; use a reward of your own"
            )
    trainer, default = recipe.trainer, ObjectiveConfig()
    for name in ("clip_low", "clip_high", "clip_dual"):
        value = getattr(trainer.objective, name)
        if trainer.ratios_are_one and value != getattr(default, name):
            yield (
                f"trainer.objective.{name}={value} has no effect: with trainer.minibatches=1 and "
                f"proximal={trainer.objective.proximal} every ratio is 1; more mini-batches make "
                "them differ"
            )
    objective = trainer.objective
    clip_value = objective.critic.clip_value
    if trainer.minibatches == 1 and clip_value != default.critic.clip_value:
        yield (
            f"trainer.objective.critic.clip_value={clip_value} has no effect: with "
            "trainer.minibatches=1 the critic's values are still those that the step began with"
        )
    penalizes = objective.kl.coef > 0 and objective.kl.placement == "reward"
    if penalizes and objective.scale_rewards == "group":
        yield (
            "trainer.objective.kl.placement=reward with scale_rewards=group: groups with equal "
            "rewards differ only in the penalty, which is scaled up to deviation 1; "
            "scale_rewards=batch or none keeps it small"
        )
    optimizer = trainer.optimizer
    if optimizer.warmup_steps >= trainer.total_steps:
        yield (
            f"trainer.optimizer.warmup_steps={optimizer.warmup_steps}: the learning rate "
            f"never reaches its peak in {trainer.total_steps} steps"
        )
    if 0 < optimizer.lr * optimizer.weight_decay < SMALLEST_DECAY_OF_A_STEP:
        yield (
            f"trainer.optimizer.weight_decay={optimizer.weight_decay:g} has no effect: a step at "
            f"lr={optimizer.lr:g} subtracts {optimizer.lr * optimizer.weight_decay:.0e} of a "
            "weight, which rounds to 0 in float32; set weight_decay=0, or a larger one"
        )
    rollout = recipe.rollout
    if rollout.failed_episodes == "drop" and rollout.min_samples is None:
        yield (
            "rollout.failed_episodes=drop: one failed episode drops its whole group while "
            "rollout.min_samples is null; set min_samples=2 to train the others"
        )
    agent = recipe.rollout.agent
    if agent.isolation == "none":
        yield (
            "rollout.agent.isolation=none: commands of the agent run as you, and can read and "
            "change all that you can, its reward and this run included"
        )
    elif agent.isolation and agent.sandbox.network == "open":
        yield (
            "rollout.agent.sandbox.network=open: commands of the agent reach all that a node "
            "reaches, the services of this run and of other users included"
        )
    if recipe.reward.isolation == "none":
        yield (
            "reward.isolation=none: programs of the model, and scorers and gyms that read replies, "
            "can read and change all that you can, this run included"
        )


def find_repeated_rows(recipe: Recipe, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning for each batch larger than its data set; `counts` are rows by its key."""
    batches = {"train_dataset": ("trainer", recipe.trainer.batch_size)}
    if recipe.sft:
        batches["sft.dataset"] = ("sft", recipe.sft.batch_size)
    for key, rows in counts.items():
        section, size = batches[key]
        if size > rows:
            yield (
                f"{section}.batch_size={size} is more than the {rows} rows of {key}: every step "
                f"takes rows more than once; use {rows} or less, or add rows"
            )


def _find_training_conflicts(
    recipe: Recipe, objectives: Sequence[ObjectiveConfig]
) -> Iterator[Problem]:
    if recipe.model.tiny is not None and recipe.sft is None:
        yield Problem(
            "a tiny model trains its tokenizer on SFT demonstrations, but the recipe has no "
            "sft section",
            "model.tiny",
            "add an sft section, or set model.path to an existing model",
        )
    trainer, parallel = recipe.trainer, recipe.trainer.parallel
    if recipe.sft is not None and recipe.sft.lora is not None and parallel.shard_parameters:
        yield Problem(
            "sft.lora and trainer.parallel.shard_parameters exclude each other: each rank has the "
            "whole frozen base",
            "sft.lora",
            "leave one of them out",
        )
    undivided = f"trainer.batch_size={trainer.batch_size} is not divisible by trainer"
    if trainer.batch_size % trainer.minibatches:
        message = f"{undivided}.minibatches={trainer.minibatches}"
        yield Problem(message, "trainer.minibatches", f"use a divisor of {trainer.batch_size}")
    if trainer.batch_size % parallel.dp:
        message = f"{undivided}.parallel.dp={parallel.dp}"
        yield Problem(message, "trainer.batch_size", f"use a multiple of {parallel.dp}")
    if trainer.lora and trainer.lora.sync == "adapter" and recipe.weights.goes_by_files:
        yield Problem(
            "trainer.lora.sync=adapter sends an adapter, and weights.transport="
            f"{recipe.weights.transport} writes whole models",
            "weights.transport",
            "use weights.transport=broadcast, or trainer.lora.sync=merged",
        )
    if trainer.profile and recipe.train_dataset is None:
        yield Problem(
            "trainer.profile traces steps of reinforcement learning, and without train_dataset "
            "there are none",
            "trainer.profile",
            "set trainer.profile=null",
        )
    elif profile := trainer.profile:
        lasts = {"steps": trainer.total_steps, "ranks": parallel.world_size - 1}
        for name, last in lasts.items():
            if (largest := max(getattr(profile, name), default=0)) > last:
                message = f"trainer.profile.{name} has {largest}, and the last is {last}"
                yield Problem(message, f"trainer.profile.{name}", f"name those up to {last}")
    objective = trainer.objective
    settings = list_trained_settings(recipe, objectives, RATIO_SETTINGS)
    for key, value in settings.items() if trainer.ratios_are_one else ():
        yield Problem(
            f"{key}={value} would have no effect: with trainer.minibatches=1 and "
            f"trainer.objective.proximal={objective.proximal} every ratio is 1",
            key,
            "set trainer.minibatches=2 or more, or trainer.objective.proximal=none with "
            "off_policy_correction=none",
        )
    warmup_steps = objective.critic.warmup_steps
    if warmup_steps >= trainer.total_steps:
        yield Problem(
            f"trainer.objective.critic.warmup_steps={warmup_steps} of trainer.total_steps="
            f"{trainer.total_steps}: the policy would never be trained",
            "trainer.objective.critic.warmup_steps",
            f"use {trainer.total_steps - 1} or less, or raise trainer.total_steps",
        )
    senders = recipe.weights.senders
    if senders is not None and senders > parallel.world_size:
        yield Problem(
            f"weights.senders={senders} of {parallel.world_size} trainer ranks: each sender is one "
            "of them",
            "weights.senders",
            f"use {parallel.world_size} or less, or null for one on each trainer node",
        )
    ranks = parallel.tp * parallel.cp * parallel.dp
    if ranks % parallel.ep:
        yield Problem(
            f"experts cannot be divided over ep={parallel.ep}: each pipeline stage has "
            f"tp x cp x dp = {ranks} ranks",
            "trainer.parallel.ep",
            f"use a divisor of {ranks}",
        )


def _find_episode_problems(recipe: Recipe) -> Iterator[Problem]:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    has_episodes = recipe.train_dataset is not None or bool(recipe.evaluation_sets)
    if has_episodes and rollout.agent.mode != "online" and not rollout.workflow:
        key = "rollout.workflow"
        yield Problem("this key is required", key, f"add {key}=... to the recipe")
    if evaluation.workflow_kwargs and not evaluation.workflow:
        message = "evaluation.workflow_kwargs is set but evaluation.workflow is not"
        yield Problem(message, "evaluation.workflow_kwargs", "add evaluation.workflow=...")
    yield from _find_evaluation_set_conflicts(recipe)
    if evaluation.separate_cell and not recipe.evaluation_sets:
        yield Problem(
            "evaluation.separate_cell=true needs a valid_dataset or evaluation.sets",
            "evaluation.separate_cell",
            "add a valid_dataset (not available with mode=online) or set "
            "evaluation.separate_cell=false",
        )
    if rollout.curriculum and any(source.weight != 1 for source in recipe.train_mixture):
        yield Problem(
            "weights of train_dataset.sources are ignored when rollout.curriculum is set",
            "train_dataset.sources",
            "remove the weights, or weight the rows in the curriculum function",
        )


def _find_online_conflicts(recipe: Recipe) -> Iterator[Problem]:
    rollout, evaluation, agent = recipe.rollout, recipe.evaluation, recipe.rollout.agent
    if agent.mode != "online":
        if agent.train_on == "people":
            yield Problem(
                f"people's sessions cannot be trained with mode={agent.mode}",
                "rollout.agent.train_on",
                "set rollout.agent.mode=online, or remove it: areal-hpc start records all the same",
            )
        return
    runs_agent, no_held_out = "external programs run the agent", "nothing would play held-out tasks"
    alternative = "evaluate the exported model"
    for is_set, key, reason, hint in (
        (rollout.workflow, "rollout.workflow", runs_agent, "leave it out"),
        (agent.isolation, "rollout.agent.isolation", runs_agent, "remove it"),
        (
            agent.auxiliary != "keep",
            "rollout.agent.auxiliary",
            "external programs reward their sessions themselves",
            "use keep",
        ),
        (
            rollout.failed_episodes != "retry",
            "rollout.failed_episodes",
            "an external program that ends without a reward is replaced by the next one",
            "use retry",
        ),
        (
            rollout.extra_samples,
            "rollout.extra_samples",
            "an external episode cannot be cancelled",
            "use 0",
        ),
        (evaluation.workflow, "evaluation.workflow", no_held_out, "leave it out"),
        (
            any(source.workflow for source in recipe.train_mixture),
            "train_dataset.sources",
            runs_agent,
            "leave their workflow out",
        ),
        (evaluation.sets, "evaluation.sets", no_held_out, f"set it to null; {alternative}"),
        (recipe.valid_dataset, "valid_dataset", no_held_out, f"remove it; {alternative}"),
    ):
        if is_set:
            yield Problem(f"{key} cannot be used with mode=online: {reason}", key, hint)


def _find_evaluation_set_conflicts(recipe: Recipe) -> Iterator[Problem]:
    try:
        resolve_keep_best(recipe.evaluation, recipe.evaluation_sets)
    except ValueError as error:
        key = "evaluation.keep_best"
        message = f"{key}={recipe.evaluation.keep_best}: {error}"
        yield Problem(message, key, "name one of them, or leave it out")
    if recipe.valid_dataset is not None and VALIDATION_SET_NAME in recipe.evaluation.sets:
        yield Problem(
            f"valid_dataset is the evaluation set {VALIDATION_SET_NAME}, "
            "and evaluation.sets has another",
            f"evaluation.sets.{VALIDATION_SET_NAME}",
            "remove valid_dataset, or give the set another name",
        )
    for name, config in recipe.evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if config.workflow_kwargs and not config.workflow:
            message = f"{key}.workflow_kwargs is set but {key}.workflow is not"
            yield Problem(message, f"{key}.workflow_kwargs", f"add {key}.workflow=...")
        n_samples = config.n_samples or recipe.evaluation.n_samples
        for metric in config.metrics:
            if resolve_k(metric, n_samples) > n_samples:
                yield Problem(
                    f"{metric} needs {resolve_k(metric, n_samples)} samples of a task, and "
                    f"{key}.n_samples={n_samples}",
                    f"{key}.metrics",
                    f"use pass@{n_samples} or less, or a larger {key}.n_samples",
                )


def _find_sandbox_conflicts(recipe: Recipe) -> Iterator[Problem]:
    agent, key = recipe.rollout.agent, "rollout.agent.sandbox"
    if agent.isolation is None and agent.sandbox != SandboxConfig():
        yield Problem(
            "rollout.agent.sandbox describes a sandbox, but rollout.agent.isolation names none",
            key,
            "add rollout.agent.isolation=bwrap, or remove it",
        )
    if agent.sandbox.keep_files and agent.mode == "subproc":
        yield Problem(
            "files of sandboxes are kept by the driver, and agents of mode=subproc hold their own",
            f"{key}.keep_files",
            "use rollout.agent.mode=inline, or remove it",
        )
    yield from _find_harbor_conflicts(recipe)
    yield from _find_agent_python_conflicts(recipe)
    if agent.isolation == "none" and agent.sandbox.root:
        yield Problem(
            "rollout.agent.sandbox.root cannot be used with rollout.agent.isolation=none",
            f"{key}.root",
            "use rollout.agent.isolation=bwrap, or remove it",
        )


def _find_agent_python_conflicts(recipe: Recipe) -> Iterator[Problem]:
    agent = recipe.rollout.agent
    if agent.variables and agent.mode != "subproc":
        yield Problem(
            "rollout.agent.variables names variables for agents in worker processes, and mode="
            f"{agent.mode} has none",
            "rollout.agent.variables",
            "use rollout.agent.mode=subproc, or remove it: other agents see the whole environment",
        )
    if agent.python and agent.mode != "subproc":
        yield Problem(
            f"rollout.agent.python cannot be used with mode={agent.mode}: such agents run in the "
            "driver, or elsewhere",
            "rollout.agent.python",
            "use rollout.agent.mode=subproc",
        )
    if agent.python and agent.isolation:
        yield Problem(
            "rollout.agent.python cannot be used with rollout.agent.isolation: an agent without "
            "areal_hpc gets no sandbox",
            "rollout.agent.isolation",
            "remove one of them",
        )


def _find_harbor_conflicts(recipe: Recipe) -> Iterator[Problem]:
    isolation = recipe.rollout.agent.isolation
    for part, key in recipe.task_sets_with_keys:
        if part.is_harbor and isolation in (None, "none"):
            yield Problem(
                "Harbor's tasks need a sandbox, and rollout.agent.isolation is "
                f"{isolation or 'null'}",
                f"{key}.path",
                "use rollout.agent.isolation=bwrap",
            )


def _find_rollout_conflicts(
    recipe: Recipe, objectives: Sequence[ObjectiveConfig]
) -> Iterator[Problem]:
    rollout, cells = recipe.rollout, recipe.inference.cells
    settings = list_trained_settings(recipe, objectives, GROUP_SETTINGS)
    if rollout.n_samples < 2 and settings:
        compares = " and ".join(f"{key}={value}" for key, value in settings.items())
        yield Problem(
            f"rollout.n_samples={rollout.n_samples}: {compares} compare the episodes of one task, "
            "so at least 2 are needed",
            "rollout.n_samples",
            "use 2 or more, or an objective with baseline=batch_mean and scale_rewards=batch",
        )
    if rollout.n_samples < 2 and rollout.filter_same_reward:
        yield Problem(
            "rollout.filter_same_reward=true leaves out groups whose episodes all earned the same: "
            f"with rollout.n_samples={rollout.n_samples} every one",
            "rollout.filter_same_reward",
            "set it to false, or rollout.n_samples=2 or more",
        )
    if rollout.min_group_size > rollout.n_samples:
        message = f"min_samples={rollout.min_samples} is more than n_samples={rollout.n_samples}"
        yield Problem(message, "rollout.min_samples", f"use {rollout.n_samples} or less")
    default_tries = RolloutConfig.model_fields["max_episode_tries"].default
    if rollout.failed_episodes == "drop" and rollout.max_episode_tries != default_tries:
        yield Problem(
            f"rollout.max_episode_tries={rollout.max_episode_tries} has no effect with "
            "rollout.failed_episodes=drop: no episode is repeated",
            "rollout.max_episode_tries",
            "leave it out, or use rollout.failed_episodes=retry",
        )
    min_concurrent = max(cells, rollout.episodes_per_ticket)
    if rollout.max_concurrent_rollouts < min_concurrent:
        yield Problem(
            f"rollout.max_concurrent_rollouts={rollout.max_concurrent_rollouts} is too small: "
            f"{cells} cells with groups of {rollout.episodes_per_ticket} episodes need at least "
            f"{min_concurrent}",
            "rollout.max_concurrent_rollouts",
            f"use {min_concurrent} or more",
        )
    if rollout.adaptive_concurrency and (
        recipe.min_episode_slots_per_cell >= recipe.episode_slots_per_cell
    ):
        yield Problem(
            "rollout.adaptive_concurrency=true has no effect: a cell needs at least "
            f"{recipe.min_episode_slots_per_cell} episodes, and may run "
            f"{recipe.episode_slots_per_cell}",
            "rollout.adaptive_concurrency",
            "raise rollout.max_concurrent_rollouts, or set inference.max_running_requests",
        )
    if rollout.record_sampling_mask and rollout.sampling.top_k > MAX_MASK_TOKENS_PER_POSITION:
        yield Problem(
            "rollout.record_sampling_mask=true records up to "
            f"{MAX_MASK_TOKENS_PER_POSITION} tokens a place, got "
            f"rollout.sampling.top_k={rollout.sampling.top_k}",
            "rollout.sampling.top_k",
            f"use {MAX_MASK_TOKENS_PER_POSITION} or less, or -1 for that",
        )
    for name, neutral in (("top_p", 1.0), ("top_k", -1)):
        value = getattr(rollout.sampling, name)
        if value != neutral and not rollout.record_sampling_mask:
            yield Problem(
                f"rollout.sampling.{name}={value} leaves tokens out without a record of it, and "
                "replies that were not sampled from the whole softmax are not trained",
                f"rollout.sampling.{name}",
                f"use {neutral}, or rollout.record_sampling_mask=true; "
                f"evaluation.sampling.{name} may be another",
            )
    if rollout.sampling.temperature < GREEDY_TEMPERATURE_BOUND:
        yield Problem(
            f"rollout.sampling.temperature={rollout.sampling.temperature:g} makes all episodes of "
            "a group identical, so there is nothing to learn",
            "rollout.sampling.temperature",
            "use 1.0",
        )


def _find_served_teacher_conflicts(recipe: Recipe) -> Iterator[Problem]:
    if recipe.trainer.objective.teacher.url is None:
        return
    rollout = recipe.rollout
    for name, value, required in (
        ("sampling.temperature", rollout.sampling.temperature, 1.0),
        ("record_sampling_mask", rollout.record_sampling_mask, False),
    ):
        if value != required:
            yield Problem(
                f"rollout.{name}={value}: the server of trainer.objective.teacher.url gives "
                "log-probabilities of the whole softmax at temperature 1",
                f"rollout.{name}",
                f"use {str(required).lower()}, or trainer.objective.teacher.path",
            )
    if rollout.agent.sampling == "agent":
        yield Problem(
            "rollout.agent.sampling=agent lets agents request another temperature than 1, which "
            "the server of trainer.objective.teacher.url cannot score",
            "rollout.agent.sampling",
            "use recipe, or trainer.objective.teacher.path",
        )


def _find_serving_conflicts(recipe: Recipe) -> Iterator[Problem]:
    tries, timeout_s = recipe.rollout.max_episode_tries, recipe.proxy.session_timeout_s
    longest_s = recipe.rollout.episode_timeout_s * tries
    if timeout_s < longest_s:
        yield Problem(
            f"proxy.session_timeout_s={timeout_s:.0f} is shorter than {tries} attempts of one "
            f"episode ({longest_s:.0f} s)",
            "proxy.session_timeout_s",
            f"use {longest_s:.0f} or more",
        )
