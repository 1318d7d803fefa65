"""Recipe sections `evaluation` and `alerts`, by which a run is judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from areal_hpc.evaluation.set_metrics import (
    DEFAULT_PASS_REWARD,
    METRIC_PATTERN,
    format_metric_name,
    list_computed_metric_names,
)
from areal_hpc.evaluation.set_names import TICKETS_PER_SET, VALIDATION_SET_NAME
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.sections.dataset import SET_NAME_PATTERN, MixtureSourceConfig, TaskSetConfig
from areal_hpc.recipe.sections.rollout import SamplingConfig
from areal_hpc.wire.trajectory import MAX_TEMPERATURE

MAX_SAMPLES = 1024
MAX_SET_TASKS = TICKETS_PER_SET
"""Maximum number of a set's tasks in one evaluation, as each task has a ticket."""


class EvaluationSamplingConfig(SamplingConfig):
    """Generation parameters of held-out episodes; greedy unless changed."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 0.0
    """Sampling temperature; 0 is greedy."""


class EvaluationSetConfig(BaseConfig):
    """Named set of held-out tasks, with an agent, sampling and metrics of its own."""

    dataset: TaskSetConfig
    """Tasks of the set; keys as in `valid_dataset`."""
    workflow: str = ""
    """Dotted path of the set's agent; empty: that of the source of `train_dataset` with the set's
    name, else `evaluation.workflow`."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    tasks: Annotated[int | None, Field(ge=1, le=MAX_SET_TASKS)] = None
    """Number of first tasks of the set in one evaluation; null: `evaluation.tasks`."""
    n_samples: Annotated[int | None, Field(ge=1, le=MAX_SAMPLES)] = None
    """Episodes of each task; null: `evaluation.n_samples`."""
    sampling: EvaluationSamplingConfig | None = None
    """Generation parameters; null: `evaluation.sampling`."""
    metrics: tuple[Annotated[str, Field(pattern=METRIC_PATTERN)], ...] = ("avg@k",)
    """`avg@k`, `pass@k` or `cons@k`; k is `n_samples`, in `pass@` any number up to it."""
    pass_reward: Annotated[float, Field(allow_inf_nan=False)] = DEFAULT_PASS_REWARD
    """Least reward of a sample that passes."""
    every_steps: Annotated[int | None, Field(ge=0)] = None
    """Steps between evaluations; null: `evaluation.every_steps`."""


def _drop_nulls(sets: Any) -> Any:
    if isinstance(sets, dict):
        return {name: config for name, config in sets.items() if config is not None}
    return {} if sets is None else sets


class EvaluationConfig(BaseConfig):
    """Evaluation of the weights on held-out tasks."""

    every_steps: Annotated[int, Field(ge=0)] = 5
    """Steps between evaluations; 0 evaluates only the first and the last weights."""
    tasks: Annotated[int, Field(ge=1, le=MAX_SET_TASKS)] = 256
    """Held-out tasks of one evaluation."""
    n_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Episodes of each held-out task."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Generation parameters; greedy unless changed."""
    workflow: str = ""
    """Dotted path of the agent for evaluation; empty: `rollout.workflow`."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    sets: Annotated[
        dict[Annotated[str, Field(pattern=SET_NAME_PATTERN)], EvaluationSetConfig],
        BeforeValidator(_drop_nulls),
    ] = Field(default_factory=dict)
    """Further sets of held-out tasks by name; null removes one. `valid_dataset` is `valid`."""
    keep_best: Annotated[str, Field(pattern=r"^$|^[^/]+/[^/]+$")] = ""
    """Metric whose best checkpoint is kept: `SET/METRIC`, such as `aime/pass@k`; empty: none."""
    separate_cell: bool = False
    """Whether to evaluate in an additional cell, in parallel with training."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Evaluation set with all inherited settings resolved."""

    name: str
    number: int
    """Index among the sets, from which the ids of its tickets follow."""
    dataset: TaskSetConfig
    dataset_key: str
    """Recipe key of its tasks."""
    workflow: str
    """Dotted path of its agent; empty: `rollout.workflow`."""
    workflow_kwargs: dict[str, Any]
    tasks: int
    n_samples: int
    sampling: EvaluationSamplingConfig
    sampling_key: str
    metrics: tuple[str, ...]
    pass_reward: float
    every_steps: int


def resolve_keep_best(evaluation: EvaluationConfig, sets: tuple[EvaluationSet, ...]) -> str:
    """Resolve `evaluation.keep_best`, with a number in place of k.

    Raises:
        ValueError: The set or its metric does not exist; the message lists the existing ones.
    """
    if not evaluation.keep_best:
        return ""
    name, _, metric = evaluation.keep_best.partition("/")
    known = {
        f"{item.name}/{metric}": item
        for item in sets
        for metric in list_computed_metric_names(item.metrics, item.n_samples)
    }
    named = [item for item in sets if item.name == name]
    if named and metric.endswith("@k"):
        metric = format_metric_name(metric, named[0].n_samples)
    if f"{name}/{metric}" not in known:
        raise ValueError(f"no set has this metric; there are: {', '.join(known) or 'none'}")
    return f"{name}/{metric}"


def resolve_evaluation_sets(
    evaluation: EvaluationConfig,
    valid_dataset: TaskSetConfig | None,
    train_sources: Sequence[MixtureSourceConfig] = (),
) -> tuple[EvaluationSet, ...]:
    """Resolve all sets: `valid` has number 0, the others follow in the order of their names."""
    configs = dict(evaluation.sets)
    if valid_dataset is not None:
        configs[VALIDATION_SET_NAME] = EvaluationSetConfig(dataset=valid_dataset)
    others = sorted(configs.keys() - {VALIDATION_SET_NAME})
    source_agents = {source.name: source for source in train_sources if source.workflow}
    numbers = {VALIDATION_SET_NAME: 0} | {name: index for index, name in enumerate(others, 1)}
    return tuple(
        _resolve_set(
            evaluation,
            name,
            number,
            configs[name],
            "valid_dataset"
            if name == VALIDATION_SET_NAME and valid_dataset is not None
            else f"evaluation.sets.{name}.dataset",
            source_agents.get(name, evaluation),
        )
        for name, number in numbers.items()
        if name in configs
    )


def _resolve_set(
    evaluation: EvaluationConfig,
    set_name: str,
    set_number: int,
    config: EvaluationSetConfig,
    dataset_key: str,
    inherited_agent: EvaluationConfig | MixtureSourceConfig,
) -> EvaluationSet:
    agent = config if config.workflow else inherited_agent
    key = f"evaluation.sets.{set_name}"
    return EvaluationSet(
        name=set_name,
        number=set_number,
        dataset=config.dataset,
        dataset_key=dataset_key,
        workflow=agent.workflow,
        workflow_kwargs=agent.workflow_kwargs,
        tasks=config.tasks or evaluation.tasks,
        n_samples=config.n_samples or evaluation.n_samples,
        sampling=config.sampling or evaluation.sampling,
        sampling_key=f"{key}.sampling" if config.sampling else "evaluation.sampling",
        metrics=config.metrics,
        pass_reward=config.pass_reward,
        every_steps=evaluation.every_steps if config.every_steps is None else config.every_steps,
    )


AlertName = Literal[
    "no_signal",
    "reward_drop",
    "engine_mismatch",
    "failing_agents",
    "reward_hacking",
    "low_entropy",
    "reply_length",
    "repetition",
    "cut_replies",
    "unrewarded_replies",
    "full_disk",
    "slow_cell",
]
"""Names of the rules in `areal_hpc/metrics/alerts.py`."""


class AlertsConfig(BaseConfig):
    """Rules on the metrics of each step.

    A failure makes `areal-hpc status` exit with 1, a note is only printed (docs/metrics.md).
    """

    off: tuple[AlertName, ...] = ()
    """Rules to switch off."""
