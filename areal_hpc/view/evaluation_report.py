"""Results of an evaluation: metrics of its sets with intervals, and comparison with another."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

import msgspec

from areal_hpc.errors import RecipeError, escape_controls
from areal_hpc.evaluation.set_metrics import (
    DEFAULT_PASS_REWARD,
    SetSamples,
    compute_task_values,
    estimate_metrics,
    format_metric_name,
)
from areal_hpc.evaluation.statistics import Estimate, PairedComparison, compare_paired
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.manifests import EvaluationResult, read_json_file, read_kept_evaluation
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.formatting import format_table

MEAN_METRIC_PREFIX = "avg@"


class WrittenEstimate(msgspec.Struct, frozen=True):
    """Mean over tasks with its 95 % interval, as stored in the file of results."""

    value: float
    low: float | None
    """None if there is no bound, as for one task: JSON has no infinite numbers."""
    high: float | None
    n_tasks: int

    @classmethod
    def from_estimate(cls, estimate: Estimate) -> Self:
        low, high = (end if math.isfinite(end) else None for end in (estimate.low, estimate.high))
        return cls(estimate.value, low, high, estimate.n_tasks)

    @property
    def interval_text(self) -> str:
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return f"[{low:.3f}, {high:.3f}]"


class EvaluatedSet(msgspec.Struct, frozen=True):
    tasks_digest: str
    """Digest of the tasks that were played: results on other tasks cannot be compared."""
    metrics: dict[str, WrittenEstimate]
    """Estimates by metric name, with a number in place of k."""
    samples: list[list[float]]
    """Rewards of the samples of each task."""
    answers: list[list[str]] = []
    """Answers of the samples of each task; empty if there are none."""
    failures: dict[int, str] = {}
    """Reasons by task, for tasks whose agent failed; they count as reward 0."""
    pass_reward: float = DEFAULT_PASS_REWARD


class EvaluationReport(msgspec.Struct, frozen=True):
    """Content of the file of results of `areal-hpc eval`."""

    model: str
    run: str = ""
    """Run directory of the evaluated checkpoint; empty for a model."""
    step: int | None = None
    sets: dict[str, EvaluatedSet] = {}

    @property
    def name(self) -> str:
        return self.model if self.step is None else f"step {self.step}"


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    set_name: str
    metric: str
    before: float
    after: float
    comparison: PairedComparison


def build_evaluated_set(
    result: EvaluationResult, tasks: Path, metrics: Sequence[str], pass_reward: float
) -> EvaluatedSet:
    samples = SetSamples(result.list_sample_rewards(), result.answers)
    estimates = estimate_metrics(samples, metrics, pass_reward)
    return EvaluatedSet(
        compute_tasks_digest(tasks, result.n_tasks),
        {name: WrittenEstimate.from_estimate(estimate) for name, estimate in estimates.items()},
        result.list_sample_rewards(),
        result.answers,
        result.failures,
        pass_reward,
    )


def compute_tasks_digest(tasks: Path, n_tasks: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with tasks.open("rb") as stream:
        for line in islice(stream, n_tasks):
            digest.update(line.rstrip(b"\n") + b"\n")
    return digest.hexdigest()


def write_evaluation_report(paths: RunPaths, report: EvaluationReport) -> None:
    content = msgspec.json.format(msgspec.json.encode(report), indent=1)
    write_atomic(paths.evaluation_report, content)


def read_report(file_or_dir: Path) -> EvaluationReport:
    path = RunPaths(file_or_dir).evaluation_report if file_or_dir.is_dir() else file_or_dir
    report = read_json_file(path, EvaluationReport)
    if report is None:
        raise RecipeError(
            f"there are no results of an evaluation at {file_or_dir}",
            key="--compare",
            hint=f"give a step, or a file {path.name} that areal-hpc eval wrote",
        )
    return report


def format_report(report: EvaluationReport) -> Iterator[str]:
    rows = [("set", "metric", "value", "95 % interval", "tasks", "samples")]
    for name, results in report.sets.items():
        for metric, estimate in results.metrics.items():
            shape = (str(len(results.samples)), str(len(results.samples[0])))
            rows.append((name, metric, f"{estimate.value:.3f}", estimate.interval_text, *shape))
    yield from format_table(rows, right_aligned_columns={2, 4, 5})
    for name, results in report.sets.items():
        if results.failures:
            task, reason = next(iter(results.failures.items()))
            yield f"{name}: the agent failed on {len(results.failures)} tasks, which count as 0"
            first = reason.splitlines()[0] if reason else "no reason"
            yield f"  task {task}: {escape_controls(first)}"


def check_comparable(before: EvaluationReport, after: EvaluationReport) -> list[str]:
    """Return the sets that both reports have.

    `after` may be of an evaluation that is still to be played.

    Raises:
        RecipeError: There is none, or one was evaluated on other tasks or with another pass reward.
    """
    common = [name for name in after.sets if name in before.sets]
    if not common:
        raise RecipeError(
            f"{before.name} was evaluated on {', '.join(before.sets) or 'no set'}, "
            f"this on {', '.join(after.sets)}",
            key="--compare",
            hint="evaluate it on the same set first",
        )
    for name in common:
        old, new = before.sets[name], after.sets[name]
        if old.tasks_digest != new.tasks_digest:
            raise RecipeError(
                f"{before.name} was evaluated on other tasks of {name}: "
                f"{len(old.samples)}, this on {len(new.samples)}",
                key="--compare",
                hint="evaluate both on the same tasks",
            )
        if old.pass_reward != new.pass_reward:
            raise RecipeError(
                f"a sample of {name} passes from a reward of {new.pass_reward} here, and of "
                f"{old.pass_reward} in {before.name}",
                key=f"evaluation.sets.{name}.pass_reward",
                hint="evaluate both with the same pass_reward",
            )
    return common


def compare_reports(
    report_before: EvaluationReport, report_after: EvaluationReport
) -> list[ComparedMetric]:
    """Compare the metrics that both reports have, on the sets that both have, by a paired test."""
    return [
        metric
        for name in check_comparable(report_before, report_after)
        for metric in _compare_sets(
            name, report_before.sets[name], report_after.sets[name], report_before.name
        )
    ]


def _compare_sets(
    set_name: str, before: EvaluatedSet, after: EvaluatedSet, title: str
) -> Iterator[ComparedMetric]:
    is_compared = False
    for metric in after.metrics:
        same = _find_same_metric(metric, before)
        if same is None:
            continue
        values = _compute_values_by_task(same, before), _compute_values_by_task(metric, after)
        if values[0] and values[1]:
            is_compared = True
            yield ComparedMetric(
                set_name,
                metric if same == metric else f"{metric} ({same} before)",
                before.metrics[same].value,
                after.metrics[metric].value,
                compare_paired(*values),
            )
    if not is_compared:
        raise RecipeError(
            f"{title} has {', '.join(before.metrics) or 'no number'} of {set_name}, "
            f"this {', '.join(after.metrics) or 'none'}",
            key="--compare",
            hint="evaluate both with the same metrics and n_samples",
        )


def _find_same_metric(metric: str, other_set: EvaluatedSet) -> str | None:
    if metric in other_set.metrics:
        return metric
    means = [name for name in other_set.metrics if name.startswith(MEAN_METRIC_PREFIX)]
    return means[0] if means and metric.startswith(MEAN_METRIC_PREFIX) else None


def list_uncompared_metrics(
    report_before: EvaluationReport,
    report_after: EvaluationReport,
    compared_metrics: Sequence[ComparedMetric],
) -> Iterator[str]:
    for name, results in report_after.sets.items():
        seen = {row.metric.partition(" ")[0] for row in compared_metrics if row.set_name == name}
        if missing := [metric for metric in results.metrics if metric not in seen]:
            known = report_before.sets[name].metrics if name in report_before.sets else {}
            has = f"has {', '.join(known)}" if known else "was not evaluated on it"
            yield f"not compared: {', '.join(missing)} of {name}; {report_before.name} {has}"


def _compute_values_by_task(metric: str, evaluated_set: EvaluatedSet) -> list[float]:
    kind, _, k = metric.partition("@")
    samples = SetSamples(evaluated_set.samples, evaluated_set.answers)
    requested = metric if kind == "pass" else f"{kind}@k"
    assert kind == "pass" or format_metric_name(requested, samples.n_samples) == metric, k
    values = compute_task_values(requested, samples, evaluated_set.pass_reward)
    return [] if values is None else values.tolist()


def format_comparison(
    before: str, after: str, compared_metrics: Sequence[ComparedMetric]
) -> Iterator[str]:
    head = ("set", "metric", before, after, "difference", "95 % interval", "p", "better", "worse")
    rows = [(*head, "")]
    for row in compared_metrics:
        difference = row.comparison.difference
        rows.append(
            (
                *(row.set_name, row.metric, f"{row.before:.3f}", f"{row.after:.3f}"),
                f"{difference.value:+.3f}",
                f"[{difference.low:+.3f}, {difference.high:+.3f}]",
                f"{row.comparison.p_value:.3g}",
                *(str(row.comparison.better), str(row.comparison.worse), row.comparison.verdict),
            )
        )
    yield from format_table(rows, right_aligned_columns={2, 3, 4, 6, 7, 8})


def build_step_report(
    paths: RunPaths, step: int, sets: Mapping[str, tuple[Sequence[str], float]]
) -> EvaluationReport:
    """Build a report of the run's own evaluation of a step, on sets with metrics and pass reward.

    Leave out sets without a result.
    """
    evaluated_sets = {}
    for name, (metrics, pass_reward) in sets.items():
        result = read_kept_evaluation(paths, step, name)
        if result is not None:
            tasks = paths.evaluation_tasks(name)
            evaluated_sets[name] = build_evaluated_set(result, tasks, metrics, pass_reward)
    return EvaluationReport("", str(paths.root), step, evaluated_sets)
