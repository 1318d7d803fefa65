"""AReaL's configuration: its dataclasses, and a script's command line as one of them.

Names and defaults are AReaL's (`areal/api/cli_args.py`, version 2.0.0 of 2026-08-22). Sections that
have no effect here, or that SGLang reads unchanged, stay plain mappings. The classes are plain
dataclasses, so that users can subclass them as in AReaL's guides.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_hpc.errors import Problem, RecipeError

ConfigT = TypeVar("ConfigT")


@dataclass
class GenerationHyperparameters:
    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 32768
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 100_000_000
    temperature: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    frequency_penalty: float = 0.0
    seed: int | None = None
    reward_normalization: bool = False
    drop_incomplete_group: bool = False

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with changes."""
        return replace(self, **{"stop_token_ids": list(self.stop_token_ids), **changes})

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """Return a copy that also stops at the tokenizer's end and padding tokens."""
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        new_ids = [id_ for id_ in ids if id_ is not None and id_ not in self.stop_token_ids]
        return self.new(stop_token_ids=[*self.stop_token_ids, *dict.fromkeys(new_ids)])


@dataclass
class AgentConfig:
    """`rollout.agent`; older files call it `rollout.openai`."""

    mode: str = "inline"
    turn_discount: float = 1.0
    export_style: str = "individual"
    subproc_max_workers: int = 4
    tool_call_parser: str = "qwen"
    reasoning_parser: str = "qwen3"
    chat_template_type: str = "hf"
    engine_max_tokens: int | None = None
    admin_api_key: str = "areal-admin-key"
    message_preprocessors: list[str] = field(default_factory=list)
    prefix_matcher: str | None = None
    drop_retry_orphans: bool = False
    session_timeout_seconds: int = 3600
    set_reward_finish_timeout: float = 0.0
    agent_cls_path: str = ""


@dataclass
class InferenceEngineConfig:
    backend: str = ""
    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: str | None = None
    tokenizer_path: str = ""
    max_concurrent_rollouts: int | None = None
    queue_size: int | None = None
    consumer_batch_size: int = 1
    max_head_offpolicyness: int = 0
    enable_rollout_tracing: bool = False
    deterministic_sampling: bool = False
    check_trajectory_format: bool = False
    dump_to_file: bool = False
    setup_timeout: float = 300.0
    request_timeout: float = 3600.0
    request_retries: int = 3
    pause_grace_period: float = 0.0
    routing_strategy: str = "round_robin"
    schedule_policy: str = "round_robin"
    return_routed_experts: bool = False
    scheduling_spec: Any = None
    scheduling_strategy: Any = None
    agent: AgentConfig = field(default_factory=AgentConfig)
    openai: AgentConfig | None = None


@dataclass
class OptimizerConfig:
    type: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float = 0.0
    warmup_steps_proportion: float = 0.001
    gradient_clipping: float = 1.0
    offload: bool = False


@dataclass
class MicroBatchSpec:
    n_mbs: int | None = 1
    granularity: int = 1
    max_tokens_per_mb: int | None = None


@dataclass
class NormConfig:
    mean_level: str | None = "batch"
    mean_leave1out: bool = False
    std_level: str | None = "batch"
    std_unbiased: bool = True
    eps: float = 1e-5
    group_size: int = 1


@dataclass
class RejectionSamplingConfig:
    """`actor.rejection_sampling`: rejection of tokens by their ratio to the sampling policy."""

    level: str = "token"
    action: str = "mask"
    metric: str = "ratio"
    agg: str = "mean"
    upper: float = 5.0
    lower: float | None = None


@dataclass
class TrainEngineConfig:
    """Keys that `actor`, `ref` and `critic` share."""

    backend: str = ""
    experiment_name: str | None = None
    trial_name: str | None = None
    path: str = ""
    attn_impl: str = "flash_attention_2"
    init_from_scratch: bool = False
    is_critic: bool = False
    disable_dropout: bool = False
    gradient_checkpointing: bool = False
    pad_to_maximum: bool = False
    enable_tree_training: bool = False
    dtype: str = "bfloat16"
    grad_reduce_dtype: str = "float32"
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    weight_update_mode: str = "xccl"
    weight_chunked_mem_mb: int = 1024
    use_lora: bool = False
    fsdp: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    archon: dict[str, Any] = field(default_factory=dict)
    scheduling_spec: Any = None
    scheduling_strategy: Any = None


@dataclass
class PPOActorConfig(TrainEngineConfig):
    ppo_n_minibatches: int = 4
    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    temperature: float = 1.0
    max_new_tokens: int = 1024
    group_size: int = 1
    reward_norm: NormConfig | None = None
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    reward_clip: float = 20.0
    overlong_reward_penalty: bool = False
    mask_no_eos_with_zero: bool = False
    discount: float = 1.0
    gae_lambda: float = 1.0
    gae_timestep_unit: str = "token"
    adv_norm: NormConfig | None = None
    kl_ctl: float = 0.1
    kl_estimator: str = "k1"
    recompute_logprob: bool = False
    use_decoupled_loss: bool = False
    prox_logp_method: str = "recompute"
    behav_imp_weight_cap: float | None = None
    rejection_sampling: RejectionSamplingConfig | None = None
    importance_sampling_level: str = "token"
    dynamic_sampling: bool = False
    log_agent_stats: bool = False


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    ppo_n_minibatches: int = 4
    eps_clip: float = 0.5
    mask_no_eos_with_zero: bool = False


@dataclass
class TeacherConfig(PPOActorConfig):
    rl_loss_weight: float = 1.0
    distill_loss_weight: float = 0.005


@dataclass
class ClusterSpecConfig:
    n_nodes: int = 1
    n_gpus_per_node: int = 8
    fileroot: str = "/tmp/areal/"
    cluster_name: str = "local"
    name_resolve: dict[str, Any] = field(default_factory=dict)


@dataclass
class SchedulerConfig:
    type: str | None = None
    site: str = ""
    """Site file, as for `areal-hpc submit --site`; the only key that AReaL does not have."""


@dataclass
class DatasetConfig:
    path: str = ""
    type: str = ""
    batch_size: int = 1
    shuffle: bool = True
    pin_memory: bool = False
    num_workers: int = 0
    drop_last: bool = True
    max_length: int | None = None


TrainDatasetConfig = ValidDatasetConfig = DatasetConfig


@dataclass
class TimerConfig:
    """Interval between two saves, evaluations or checkpoints."""

    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: str | None = None
    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: int | None = None


SaverConfig = TimerConfig


@dataclass
class EvaluatorConfig(TimerConfig):
    eval_before_train: bool = False


@dataclass
class RecoverConfig(TimerConfig):
    mode: str = "disabled"
    retries: int = 3
    no_save_optim: bool = False
    no_load_optim: bool = False


@dataclass
class StatsLoggerConfig:
    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: str | None = None
    wandb: dict[str, Any] = field(default_factory=dict)
    swanlab: dict[str, Any] = field(default_factory=dict)
    tensorboard: dict[str, Any] = field(default_factory=dict)
    trackio: dict[str, Any] = field(default_factory=dict)


@dataclass
class BaseExperimentConfig:
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
    async_training: bool = True
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    eval_gconfig: GenerationHyperparameters | None = None
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: PPOActorConfig | None = None
    critic: PPOCriticConfig | None = None
    teacher: TeacherConfig | None = None
    dynamic_bs: bool = False


GRPOConfig = PPOConfig
"""Name in AReaL's examples; the algorithms differ only in their configuration."""


@dataclass
class AgentRLConfig(GRPOConfig):
    workflow: str = ""
    eval_workflow: str = ""
    agent_type: str = ""
    n_trajs: int | None = None
    max_turns: int | None = None
    max_tokens_per_trajectory: int | None = None
    agent_builder_path: str = ""
    agent_builder_kwargs: dict[str, Any] = field(default_factory=dict)
    reward_fn_path: str = ""


def load_expr_config(argv: Sequence[str], config_class: type[ConfigT]) -> tuple[ConfigT, str]:
    """Read `--config FILE key=value ...`.

    Returns:
        The configuration, and the path of the file.

    Raises:
        RecipeError: The file is missing or is no YAML; keys are unknown; values do not fit.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="AReaL's YAML file")
    known, overrides = parser.parse_known_args(list(argv))
    values = read_areal_config_file(known.config, overrides)
    return to_config(values, config_class, str(known.config)), str(known.config)


def read_areal_config_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file, apply overrides, and resolve interpolations.

    Raises:
        RecipeError: The file is missing, no YAML, or no mapping; or an override has no `=`.
    """
    if not path.is_file():
        raise RecipeError(f"there is no configuration at {path}", key=str(path))
    malformed = [item for item in overrides if "=" not in item]
    if malformed:
        raise RecipeError.from_problems(
            Problem(f"expected key=value, got {item!r}", hint="write actor.path=/models/mine")
            for item in malformed
        )
    try:
        tree = OmegaConf.load(path)
        if not OmegaConf.is_dict(tree):
            raise RecipeError(f"{path} holds no keys and values", key=str(path))
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(overrides)))
        values: Any = OmegaConf.to_container(merged, resolve=True)
    except RecipeError:
        raise
    except Exception as error:  # boundary: PyYAML's errors have no common public base
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    return dict(values)


def to_config(values: Mapping[str, Any], config_class: type[ConfigT], file_name: str) -> ConfigT:
    """Convert a mapping to a configuration class.

    Raises:
        RecipeError: Keys are unknown, all reported with the nearest known one; or a type is wrong.
    """
    problems = list(_find_unknown_keys(values, OmegaConf.structured(config_class), ""))
    if problems:
        raise RecipeError.from_problems(problems)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config_class), dict(values))
        config: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise RecipeError(message, key=str(error.full_key or file_name)) from error
    return config  # type: ignore[no-any-return]


def _find_unknown_keys(
    values: Mapping[str, Any], config_structure: Any, prefix: str
) -> Iterator[Problem]:
    known = OmegaConf.get_type(config_structure)
    if not dataclasses.is_dataclass(known):
        return  # a plain mapping takes anything
    sections = {field.name: field for field in dataclasses.fields(known)}
    for name, value in values.items():
        if name not in sections:
            near = difflib.get_close_matches(str(name), list(sections), n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sections)}"
            yield Problem(f"unknown key {name!r}", f"{prefix}{name}", hint)
        elif isinstance(value, Mapping):
            yield from _find_unknown_keys(
                value, _find_section(config_structure, name), f"{prefix}{name}."
            )


def _find_section(config_structure: Any, section_name: str) -> Any:
    section = config_structure[section_name]
    if section is not None:
        return section
    node = config_structure._get_node(section_name)  # omegaconf has no public function for it
    kind = node._metadata.ref_type
    return OmegaConf.structured(kind) if dataclasses.is_dataclass(kind) else {}
