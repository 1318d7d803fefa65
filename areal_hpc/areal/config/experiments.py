"""AReaL's experiment configuration classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from areal_hpc.areal.config.schema import (
    ClusterSpecConfig,
    DatasetConfig,
    EvaluatorConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    PPOActorConfig,
    RecoverConfig,
    SaverConfig,
    SchedulerConfig,
    StatsLoggerConfig,
    TrainEngineConfig,
)


@dataclass
class BaseExperimentConfig:
    """Keys of every experiment."""

    experiment_name: str = ""
    trial_name: str = ""
    seed: int = 1
    enable_offload: bool = False
    total_train_epochs: int = 1
    total_train_steps: int | None = None
    tokenizer_path: str = ""
    allocation_mode: str = ""
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    launcher: dict[str, Any] = field(default_factory=dict)
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    valid_dataset: DatasetConfig | None = None
    saver: SaverConfig = field(default_factory=SaverConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    perf_tracer: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)


@dataclass
class PPOConfig(BaseExperimentConfig):
    """Reinforcement learning."""

    async_training: bool = True
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    eval_gconfig: GenerationHyperparameters | None = None
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: PPOActorConfig | None = None
    critic: TrainEngineConfig | None = None
    teacher: TrainEngineConfig | None = None
    dynamic_bs: bool = False


@dataclass
class GRPOConfig(PPOConfig):
    """The name that AReaL's examples use; the variants differ by configuration alone."""


@dataclass
class AgentRLConfig(GRPOConfig):
    """The keys that AReaL's examples of agents add."""

    workflow: str = ""
    eval_workflow: str = ""
    agent_type: str = ""
    n_trajs: int | None = None
    max_turns: int | None = None
    max_tokens_per_trajectory: int | None = None
    agent_builder_path: str = ""
    agent_builder_kwargs: dict[str, Any] = field(default_factory=dict)
    reward_fn_path: str = ""
