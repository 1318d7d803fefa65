"""One frozen tree of every stage's configuration, from YAML and dotted overrides.

Imports neither torch nor SGLang: a recipe is read and planned on a login node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator

from areal_hpc.cluster.config import ClusterConfig
from areal_hpc.config import StageConfig, explain
from areal_hpc.dataset.config import DatasetConfig, TrainDatasetConfig
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.hub import REPO_PATTERN
from areal_hpc.inference.config import InferenceConfig
from areal_hpc.proxy.config import ProxyConfig
from areal_hpc.rollout.config import EvaluationConfig, RolloutConfig
from areal_hpc.shards.config import ShardConfig
from areal_hpc.trainer.config import TrainerConfig, WarmupConfig
from areal_hpc.weights.config import WeightsConfig
from areal_hpc.yaml_tree import read_overrides, read_tree


class TinyModelConfig(StageConfig):
    """A small, randomly initialised Qwen3 made for the run."""

    layers: Annotated[int, Field(ge=1)] = 2
    """Transformer layers."""
    hidden: Annotated[int, Field(ge=8)] = 128
    """Hidden size."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Query heads."""
    kv_heads: Annotated[int, Field(ge=1)] = 2
    """Key and value heads."""
    head_dim: Annotated[int, Field(ge=8)] = 32
    """Size of one head."""
    ffn: Annotated[int, Field(ge=8)] = 384
    """Width of the feed-forward layer."""
    vocab: Annotated[int, Field(ge=300)] = 384
    """Most tokens the tokenizer may learn."""


class ModelConfig(StageConfig):
    """The starting model: exactly one of `path`, `hub` and `tiny`."""

    path: Path | None = None
    """A Hugging Face model directory: config.json, safetensors, tokenizer files."""
    hub: Annotated[str | None, Field(pattern=REPO_PATTERN)] = None
    """`owner/name` of a model on the Hugging Face hub, read from the local cache."""
    revision: str | None = None
    """Branch, tag or commit of `hub`; the branch main when null."""
    tiny: TinyModelConfig | None = None
    """Make a tiny model whose tokenizer is trained on the demonstrations."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if [self.path, self.hub, self.tiny].count(None) != 2:
            raise ValueError("give exactly one of `path`, `hub` and `tiny`")
        return self


class WarmupStage(WarmupConfig):
    """Supervised fine-tuning on demonstrations, before reinforcement learning."""

    dataset: DatasetConfig
    """Rows `{"messages": [...]}`; the last message, the assistant's, is learnt."""


class Recipe(StageConfig):
    """Everything a run is made of."""

    experiment_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Groups trials; part of the run directory."""
    trial_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """One run; part of the run directory."""
    seed: int = 1
    """Of task order, episodes, initialisation and shuffling."""
    cluster: ClusterConfig
    """Where jobs run."""
    model: ModelConfig
    """What is trained."""
    train_dataset: TrainDatasetConfig
    """Tasks to learn from."""
    valid_dataset: DatasetConfig | None = None
    """Held-out tasks; no evaluation when absent."""
    warmup: WarmupStage | None = None
    """Supervised fine-tuning first."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How often and how the weights are judged."""
    inference: InferenceConfig = InferenceConfig()
    """SGLang."""
    proxy: ProxyConfig = ProxyConfig()
    """The agent proxy."""
    rollout: RolloutConfig
    """The user's agent."""
    shards: ShardConfig = ShardConfig()
    """Recorded trajectories."""
    trainer: TrainerConfig = TrainerConfig()
    """Megatron-core."""
    weights: WeightsConfig = WeightsConfig()
    """The broadcast of new weights."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.cluster.fileroot.expanduser() / self.experiment_name / self.trial_name


def load(path: Path, overrides: Sequence[str] = (), site: Path | None = None) -> Recipe:
    """Read a recipe and apply `key.subkey=value` overrides.

    Args:
        path: The recipe.
        overrides: Win over the recipe.
        site: A file with keys of `cluster`, over which the recipe's own win.

    Raises:
        RecipeError: Every problem of the recipe at once: unknown keys with the nearest known
            one, wrong types with expected and got, values that do not fit together.
    """
    if not path.is_file():
        raise RecipeError(f"there is no recipe at {path}", hint="ls recipes/")
    trees = [] if site is None else [OmegaConf.create({"cluster": read_site(site)})]
    trees += [read_tree(path), read_overrides(overrides)]
    try:
        values = OmegaConf.to_container(OmegaConf.merge(*trees), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    return from_values(values)


def from_values(values: object) -> Recipe:
    """The recipe of a tree of keys; a RecipeError tells every problem at once."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError.of(explain(item, Recipe) for item in error.errors()) from None
    problems = [problem for check in CROSS_CHECKS for problem in check(recipe)]
    if problems:
        raise RecipeError.of(problems)
    return recipe


def read_site(path: Path) -> DictConfig:
    """The keys of a site file, each checked, though it need not hold all that a cluster has.

    Raises:
        RecipeError: Every problem of the file at once.
    """
    if not path.is_file():
        raise RecipeError(f"there is no site file at {path}", hint="ls slurm/sites/")
    tree = read_tree(path)
    try:
        ClusterConfig.model_validate(OmegaConf.to_container(tree))
    except ValidationError as error:
        problems = [
            explain(item, ClusterConfig, f"{path}: ")
            for item in error.errors()
            if item["type"] != "missing"
        ]
        if problems:
            raise RecipeError.of(problems) from None
    return tree


def _warmup_feeds_the_tiny_model(recipe: Recipe) -> Iterator[Problem]:
    if recipe.model.tiny is not None and recipe.warmup is None:
        yield Problem(
            "a tiny model learns its tokenizer from the demonstrations, and there are none",
            "model.tiny",
            "add a warmup section, or name a model directory in model.path",
        )


def _minibatches_divide_the_batch(recipe: Recipe) -> Iterator[Problem]:
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


def _experts_fit_the_ranks(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.trainer.parallel
    ranks = parallel.tp * parallel.cp * parallel.dp
    if ranks % parallel.ep:
        yield Problem(
            f"experts cannot be spread over ep={parallel.ep} of the {ranks} ranks that "
            "tp x cp x dp gives each pipeline stage",
            "trainer.parallel.ep",
            f"use a divisor of {ranks}",
        )


def _programs_come_or_an_agent_is_named(recipe: Recipe) -> Iterator[Problem]:
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


def _an_evaluation_job_has_tasks(recipe: Recipe) -> Iterator[Problem]:
    if recipe.evaluation.separate_job and recipe.valid_dataset is None:
        yield Problem(
            "there are no held-out tasks that a job of its own could play",
            "evaluation.separate_job",
            "add a valid_dataset (which mode online cannot have), or use false",
        )


def _a_group_has_at_least_two(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.n_samples < 2:
        yield Problem(
            f"n_samples={recipe.rollout.n_samples}: group-relative advantages compare episodes "
            "of one task, so one episode teaches nothing",
            "rollout.n_samples",
            "use 2 or more",
        )


def _partial_groups_are_parts(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.least_samples > rollout.n_samples:
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


def _one_thing_mixes_the_tasks(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.curriculum and any(one.weight != 1 for one in recipe.train_dataset.sources):
        yield Problem(
            "rollout.curriculum weighs every task, so the weights of sources have no say",
            "train_dataset.sources",
            "leave the weights out, and have the curriculum weigh the rows",
        )


def _episodes_fit_the_cells(recipe: Recipe) -> Iterator[Problem]:
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


def _sampling_can_be_trained_on(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout.sampling.temperature <= 0:
        yield Problem(
            "temperature=0 makes every episode of a group the same, so nothing can be learnt",
            "rollout.sampling.temperature",
            "use 1.0",
        )


def _engine_and_trainer_agree(recipe: Recipe) -> Iterator[Problem]:
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


def _sessions_outlive_episodes(recipe: Recipe) -> Iterator[Problem]:
    longest_s = recipe.rollout.episode_timeout_s * recipe.rollout.max_episode_tries
    if recipe.proxy.session_timeout_s < longest_s:
        yield Problem(
            f"session_timeout_s={recipe.proxy.session_timeout_s:.0f} is less than the "
            f"{longest_s:.0f} s that {recipe.rollout.max_episode_tries} tries of an episode take",
            "proxy.session_timeout_s",
            f"use {longest_s:.0f} or more",
        )


CROSS_CHECKS: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    _warmup_feeds_the_tiny_model,
    _minibatches_divide_the_batch,
    _experts_fit_the_ranks,
    _programs_come_or_an_agent_is_named,
    _an_evaluation_job_has_tasks,
    _a_group_has_at_least_two,
    _partial_groups_are_parts,
    _one_thing_mixes_the_tasks,
    _episodes_fit_the_cells,
    _sampling_can_be_trained_on,
    _engine_and_trainer_agree,
    _sessions_outlive_episodes,
)
"""What no single key can tell: each looks at the whole recipe and reports problems."""
