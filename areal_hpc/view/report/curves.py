"""Which curves a report draws, and the series of each from the rows of runs. Pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from areal_hpc.metrics.catalogue import find_metric
from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.metrics.step_metrics import VALIDATION_REWARD_METRIC
from areal_hpc.view.metric_values import get_number
from areal_hpc.view.report.charts import Chart, Series, draw_bars, draw_curves

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
PHASES_BY_LAYER = {
    "waiting for episodes": ("batch_wait",),
    "waiting for a replica": ("cell_wait",),
    "training": ("read", "measure", "pack", "score", "train"),
    "weight updates": ("publish",),
    "checkpoints": ("checkpoint", "export"),
    "evaluation": ("eval",),
    "small files": ("files",),
}


def draw_run_curves(rows_by_run: Mapping[str, Sequence[MetricRow]]) -> Iterator[Chart]:
    """A chart for each metric that a run has; dashed lines are restarts of the only run."""
    (only, *others) = rows_by_run.values()
    marks = [] if others else list_restart_steps(only)
    for name, title in CURVE_TITLE_BY_METRIC.items():
        series = [
            Series(
                run, [(row["step"], value) for row, value in iterate_rows_with_value(rows, name)]
            )
            for run, rows in rows_by_run.items()
        ]
        metric = find_metric(name)
        if any(one.points for one in series):
            if name.endswith("_bytes"):
                scaled = [[(x, y / 2**30) for x, y in one.points] for one in series]
                series = [
                    Series(one.label, points) for one, points in zip(series, scaled, strict=True)
                ]
            unit = metric.unit if metric else ""
            chart = draw_curves(title, "GiB" if unit == "bytes" else unit, series, marks)
            if chart is not None:
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
    layers = {
        name: [sum(get_number(row, f"time/{phase}_s") or 0.0 for phase in phases) for row in timed]
        for name, phases in PHASES_BY_LAYER.items()
    }
    totals = [get_number(row, "time/step_s") or 0.0 for row in timed]
    known = [sum(column) for column in zip(*layers.values(), strict=True)]
    layers["other"] = [max(0.0, total - sum_) for total, sum_ in zip(totals, known, strict=True)]
    steps = [row["step"] for row in timed]
    # Every layer is kept, that a color means the same in all runs.
    series = [Series(name, list(zip(steps, layers[name], strict=True))) for name in layers]
    return draw_bars(f"{run_name}: time of a step by phase", "s", series)


def list_restart_steps(rows: Sequence[MetricRow]) -> list[int]:
    return [
        row["step"]
        for before, row in pairwise(rows)
        if row.get("generation") != before.get("generation")
    ]


def get_first_mean_and_last_value(
    rows: Sequence[MetricRow], metric_name: str
) -> tuple[float, float, float] | None:
    values = [value for _, value in iterate_rows_with_value(rows, metric_name)]
    return (values[0], statistics.fmean(values), values[-1]) if values else None
