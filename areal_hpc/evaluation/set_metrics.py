"""Metrics of an evaluation set by the names that a recipe lists, such as `pass@k`. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_hpc.evaluation.set_names import EVALUATION_METRIC_PREFIX, INTERVAL_BOUND_SUFFIXES
from areal_hpc.evaluation.statistics import (
    Estimate,
    TaskValues,
    compute_pass_at_k_by_task,
    estimate_mean,
    score_majority_answer,
)

METRIC_PATTERN = r"^(avg@k|cons@k|pass@(k|[1-9][0-9]{0,3}))$"
DEFAULT_PASS_REWARD = 1.0


@dataclass(frozen=True, slots=True)
class SetSamples:
    """Rewards of a set's samples, S for each of T tasks, and their answers if there are any."""

    rewards_TS: Sequence[Sequence[float]]
    answers_TS: Sequence[Sequence[str]] = ()

    @property
    def n_samples(self) -> int:
        return len(self.rewards_TS[0])

    @property
    def has_answers(self) -> bool:
        return any(any(answers_S) for answers_S in self.answers_TS)

    def list_pass_flags_by_task(self, min_reward: float) -> list[list[bool]]:
        return [[reward >= min_reward for reward in rewards_S] for rewards_S in self.rewards_TS]


def resolve_k(metric: str, n_samples: int) -> int:
    k = metric.partition("@")[2]
    return n_samples if k == "k" else int(k)


def format_metric_name(metric: str, n_samples: int) -> str:
    return f"{metric.partition('@')[0]}@{resolve_k(metric, n_samples)}"


def list_computed_metric_names(metrics: Sequence[str], n_samples: int) -> list[str]:
    return [format_metric_name(metric, n_samples) for metric in dict.fromkeys(("avg@k", *metrics))]


def compute_task_values(metric: str, samples: SetSamples, pass_reward: float) -> TaskValues | None:
    """Return a metric's value for each task; None for `cons@k` if no sample has an answer."""
    kind, k = metric.partition("@")[0], resolve_k(metric, samples.n_samples)
    if kind == "avg":
        # Rounded once: tasks with the same rewards in another order have the same value.
        return np.array([statistics.fmean(rewards_S) for rewards_S in samples.rewards_TS])
    passes_TS = samples.list_pass_flags_by_task(pass_reward)
    if kind == "pass":
        return compute_pass_at_k_by_task([sum(flags) for flags in passes_TS], samples.n_samples, k)
    if not samples.has_answers:
        return None
    pairs = zip(samples.answers_TS, passes_TS, strict=True)
    return np.array([score_majority_answer(answers_S, passes_S) for answers_S, passes_S in pairs])


def estimate_metrics(
    samples: SetSamples, metrics: Sequence[str], pass_reward: float
) -> dict[str, Estimate]:
    """Estimate `avg@k` and each metric given; names have a number in place of k.

    Leave out metrics of more samples than there are: an evaluation to compare with may have fewer.
    """
    estimates = {}
    for metric in dict.fromkeys(("avg@k", *metrics)):
        if resolve_k(metric, samples.n_samples) > samples.n_samples:
            continue
        values_T = compute_task_values(metric, samples, pass_reward)
        if values_T is not None:
            estimates[format_metric_name(metric, samples.n_samples)] = estimate_mean(values_T)
    return estimates


def build_metric_row(set_name: str, estimates: dict[str, Estimate]) -> dict[str, float]:
    """Return the values for a row of metrics: each metric, and finite bounds of its interval."""
    row = {}
    for name, estimate in estimates.items():
        numbers = (estimate.value, estimate.low, estimate.high)
        for suffix, value in zip(("", *INTERVAL_BOUND_SUFFIXES), numbers, strict=True):
            if math.isfinite(value):
                row[f"{EVALUATION_METRIC_PREFIX}{set_name}/{name}{suffix}"] = value
    return row
