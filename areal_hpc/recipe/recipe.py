"""`Recipe`: the frozen tree of all configuration models of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.hub_cache import REPO_PATTERN
from areal_hpc.recipe.presets import apply_preset
from areal_hpc.recipe.sections.cluster import ClusterConfig
from areal_hpc.recipe.sections.dataset import (
    MixtureSourceConfig,
    TaskSetConfig,
    TrainTaskSetConfig,
)
from areal_hpc.recipe.sections.evaluation import (
    AlertsConfig,
    EvaluationConfig,
    EvaluationSet,
    EvaluationSetConfig,
    resolve_evaluation_sets,
)
from areal_hpc.recipe.sections.inference import (
    InferenceConfig,
    ProxyConfig,
    ShardConfig,
    WeightsConfig,
)
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.sections.sandbox import RewardConfig
from areal_hpc.recipe.sections.trainer import SftConfig, TrainerConfig


class TinyModelConfig(BaseConfig):
    """Randomly initialized Qwen3 with 2 layers and hidden size 128, made for the run."""

    vocab: Annotated[int, Field(ge=300)] = 384
    """Largest vocabulary that the tokenizer may learn."""


class ModelConfig(BaseConfig):
    """Initial model: exactly one of `path`, `hub` and `tiny`."""

    key_hints: ClassVar[Mapping[str, str]] = {"revision": "write hub: OWNER/NAME@REVISION"}

    path: Path | None = None
    """Hugging Face model directory: config.json, safetensors, tokenizer files."""
    hub: Annotated[str | None, Field(pattern=REPO_PATTERN)] = None
    """`owner/name` or `owner/name@revision` on the Hugging Face hub, read from the local cache."""
    tiny: TinyModelConfig | None = None
    """Tiny model to make, whose tokenizer is trained on the demonstrations."""

    @model_validator(mode="after")
    def _check_source_keys(self) -> ModelConfig:
        if [self.path, self.hub, self.tiny].count(None) != 2:
            raise ValueError("set exactly one of model.path, model.hub and model.tiny")
        return self


class SftEvaluationConfig(BaseConfig):
    """Loss on held-out demonstrations."""

    dataset: TaskSetConfig
    """Held-out demonstrations; keys as in `sft.dataset`."""
    every_steps: Annotated[int, Field(ge=1)] = 100
    """Steps between evaluations; the last step is always evaluated."""


class SftStageConfig(SftConfig):
    """Supervised fine-tuning on demonstrations, before reinforcement learning or alone."""

    dataset: TaskSetConfig
    """Rows with `messages`, or `prompt` and `completion`, and maybe `tools` (docs/sft.md)."""
    evaluation: SftEvaluationConfig | None = None
    """Loss on held-out demonstrations; null: none."""


class Recipe(BaseConfig):
    """Configuration of a run."""

    experiment_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of a group of trials; part of the run directory's path."""
    trial_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Name of the run; part of the run directory's path."""
    seed: int = 1
    """Seed of task order, episodes, initialization and shuffling."""
    cluster: ClusterConfig
    """Nodes, containers and Slurm options of the jobs."""
    model: ModelConfig
    """Initial model of the policy."""
    train_dataset: TrainTaskSetConfig | None = None
    """Training tasks; null: no reinforcement learning, only `sft`."""
    valid_dataset: TaskSetConfig | None = None
    """Held-out tasks; without them and `evaluation.sets` there is no evaluation."""
    sft: SftStageConfig | None = None
    """Supervised fine-tuning before reinforcement learning, or alone."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation of the weights on held-out tasks."""
    inference: InferenceConfig = InferenceConfig()
    """Cells of SGLang servers."""
    proxy: ProxyConfig = ProxyConfig()
    """Proxy between agents and SGLang."""
    rollout: RolloutConfig = RolloutConfig()
    """The user's agent and its episodes."""
    reward: RewardConfig = RewardConfig()
    """Isolation of rewards that run programs of the model."""
    shards: ShardConfig = ShardConfig()
    """Shards of recorded trajectories."""
    trainer: TrainerConfig = TrainerConfig()
    """Training with Megatron-core."""
    weights: WeightsConfig = WeightsConfig()
    """Updates of the servers' weights."""
    alerts: AlertsConfig = AlertsConfig()
    """Rules on the metrics of each step."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        return apply_preset(values) if isinstance(values, Mapping) else values

    @property
    def train_sources(self) -> list[tuple[TaskSetConfig, str]]:
        """Sources of training tasks, each with its key in the recipe."""
        tasks = self.train_dataset
        return [] if tasks is None else tasks.list_sources("train_dataset")

    @property
    def train_mixture(self) -> tuple[MixtureSourceConfig, ...]:
        """Sources of training tasks that are mixed by weight; empty if there is only one."""
        return () if self.train_dataset is None else self.train_dataset.sources

    @property
    def train_source_names(self) -> tuple[str, ...]:
        """Names of the sources that are mixed, or their numbers."""
        return () if self.train_dataset is None else self.train_dataset.source_names

    @property
    def demonstrations(self) -> dict[str, TaskSetConfig]:
        """Sources of demonstrations, by their key in the recipe."""
        if self.sft is None:
            return {}
        held_out = self.sft.evaluation
        return {"sft.dataset": self.sft.dataset} | (
            {} if held_out is None else {"sft.evaluation.dataset": held_out.dataset}
        )

    @property
    def task_sets_with_keys(self) -> list[tuple[TaskSetConfig, str]]:
        """All sources of tasks and demonstrations, each with its key in the recipe."""
        sources = self.train_sources
        sources += [(item.dataset, item.dataset_key) for item in self.evaluation_sets]
        return sources + [(source, key) for key, source in self.demonstrations.items()]

    @property
    def agents(self) -> list[tuple[str, dict[str, Any]]]:
        """Agents that the recipe names: dotted paths with the arguments of constructors."""
        sections: list[
            RolloutConfig | EvaluationConfig | EvaluationSetConfig | MixtureSourceConfig
        ] = [self.rollout, self.evaluation, *self.evaluation.sets.values()]
        sections += self.train_mixture
        return [(part.workflow, part.workflow_kwargs) for part in sections if part.workflow]

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """All sets of held-out tasks, that of `valid_dataset` first."""
        return resolve_evaluation_sets(self.evaluation, self.valid_dataset, self.train_mixture)

    @property
    def episode_slots_per_cell(self) -> int:
        """Number of episodes that a cell runs concurrently."""
        return max(1, self.rollout.max_concurrent_rollouts // self.inference.cells)

    @property
    def min_episode_slots_per_cell(self) -> int:
        """Number below which `rollout.adaptive_concurrency` does not go.

        It is the episodes that the next batch needs, at most what the cell's servers run at once.
        """
        rollout, inference = self.rollout, self.inference
        episodes = -(-self.trainer.batch_size * rollout.episodes_per_ticket // inference.cells)
        if inference.max_running_requests is not None:
            requests = inference.max_running_requests * inference.replicas_per_cell
            episodes = min(episodes, requests)
        return max(episodes, rollout.episodes_per_ticket)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.cluster.fileroot.expanduser() / self.experiment_name / self.trial_name
