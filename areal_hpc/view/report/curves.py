"""Which curves a report draws, and the series of each from the rows of runs. Pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from areal_hpc.metrics.catalogue import find_metric
from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.metrics.step_metrics import VALIDATION_REWARD_METRIC
from areal_hpc.metrics.step_phases import sum_times_by_activity
from areal_hpc.view.metric_values import get_number, list_restart_steps
from areal_hpc.view.report.charts import (
    Chart,
    Series,
    draw_bars,
    draw_curves,
    render_standalone_svg,
)

CURVE_TITLE_BY_METRIC = {
    "reward/mean": "training reward",
    VALIDATION_REWARD_METRIC: "held-out reward",
    "entropy/mean": "entropy",
    "reply/tokens_mean": "reply length",
    "reply/cut_fraction": "cut replies",
    "reply/repeated_fraction": "repetition",
    "groups/zero_variance": "groups without an advantage",
    "staleness/mean": "staleness",
    "logprob/engine_trainer_mean_abs_diff": "engine against trainer",
    "kl/behavior": "KL to the policy that sampled",
    "importance_weight/effective_sample_fraction": "effective samples",
    "ratio/clip_fraction": "clipped tokens",
    "grad_norm": "norm of gradients",
    "episode/duration_mean_s": "time of an episode",
    "episode/tool_time_fraction": "time outside of model calls",
    "generation/tokens_per_s": "speed of generation",
    "time/step_s": "time of a step",
    "memory/trainer_peak_bytes": "memory of a rank",
}
"""Titles by metric, in the order of the report."""


def draw_run_curves(rows_by_run: Mapping[str, Sequence[MetricRow]]) -> Iterator[Chart]:
    """A chart for each metric that a run has; dashed lines are restarts of the only run."""
    (only, *others) = rows_by_run.values()
    marks = [] if others else list_restart_steps(only)
    for name, title in CURVE_TITLE_BY_METRIC.items():
        metric = find_metric(name)
        unit, scale = metric.unit if metric else "", 1.0
        if unit == "bytes":
            unit, scale = "GiB", 2.0**-30
        series = [
            Series(
                run,
                [
                    (row["step"], scale * value)
                    for row, value in iterate_rows_with_value(rows, name)
                ],
            )
            for run, rows in rows_by_run.items()
        ]
        if (chart := draw_curves(title, unit, series, marks)) is not None:
            yield chart


def iterate_rows_with_value(
    rows: Sequence[MetricRow], metric_name: str
) -> Iterator[tuple[MetricRow, float]]:
    """The rows that have a metric, with its value; of the start of a run its evaluation alone."""
    for row in rows:
        is_told = row["step"] > 0 or metric_name == VALIDATION_REWARD_METRIC
        if is_told and (value := get_number(row, metric_name)) is not None:
            yield row, value


def build_step_time_chart(run_name: str, metric_rows: Sequence[MetricRow]) -> Chart | None:
    timed = [row for row in metric_rows if get_number(row, "time/step_s")]
    if not timed:
        return None
    times = [sum_times_by_activity(row) for row in timed]
    for row, by_activity in zip(timed, times, strict=True):
        rest = (get_number(row, "time/step_s") or 0.0) - sum(by_activity.values())
        by_activity["other"] = max(0.0, rest)
    # Every layer is kept, that a color means the same in all runs.
    layers = [
        Series(
            activity, [(row["step"], one[activity]) for row, one in zip(timed, times, strict=True)]
        )
        for activity in times[0]
    ]
    return draw_bars(f"{run_name}: time of a step by phase", "s", layers)


def render_learning_curve(rows: Sequence[MetricRow], title: str) -> str | None:
    """An SVG file with the training and the held-out reward over steps; None before the first."""
    series = [
        Series(
            label, [(row["step"], value) for row, value in iterate_rows_with_value(rows, metric)]
        )
        for label, metric in (
            ("training batch (sampled)", "reward/mean"),
            ("held-out tasks", VALIDATION_REWARD_METRIC),
        )
    ]
    chart = draw_curves(f"mean reward: {title}", "", series)
    return render_standalone_svg(chart) if chart else None


def summarize_metric(
    rows: Sequence[MetricRow], metric_name: str
) -> tuple[float, float, float] | None:
    values = [value for _, value in iterate_rows_with_value(rows, metric_name)]
    return (values[0], statistics.fmean(values), values[-1]) if values else None
