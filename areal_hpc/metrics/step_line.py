"""Text about trained steps, for the terminal and the trainer's log."""

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_hpc.evaluation.set_names import (
    EVALUATION_METRIC_PREFIX,
    INTERVAL_BOUND_SUFFIXES,
    VALIDATION_SET_NAME,
)
from areal_hpc.metrics.step_metrics import (
    VALIDATION_REWARD_METRIC,
    StepTimes,
    compute_time_shares_by_system_part,
    measure_step_times,
    select_paced_rows,
)

MAX_PACE_STEPS = 20
MAX_COMPARED_STEPS = 5
MIN_SHOWN_SHARE = 0.01
SPARKLINE_BLOCKS = "▁▂▃▄▅▆▇█"

MetricRow = Mapping[str, Any]


def format_metric(value: float | None, format_spec: str) -> str:
    return "not finite" if value is None else format(value, format_spec)


def format_step_line(row: MetricRow, total: int | None = None) -> str:
    """Format step, rewards and speed within 80 columns of a terminal."""
    return "  ".join((format_step_number(row, total), *list_step_figures(row)))


def format_step_number(row: MetricRow, total: int | None) -> str:
    total_suffix = f"/{total}" if total is not None else ""
    return f"step  {row['step']:>5}{total_suffix}"


def list_step_figures(row: MetricRow) -> Iterator[str]:
    """Yield the rewards or losses of a step, its own first, and its speed."""
    if "reward/mean" in row:
        yield f"reward {format_metric(row['reward/mean'], '.3f')}"
    elif "loss" in row:  # supervised fine-tuning
        yield f"loss {format_metric(row['loss'], '.4f')}"
    if "eval/loss" in row:
        yield f"held-out loss {format_metric(row['eval/loss'], '.4f')}"
    if VALIDATION_REWARD_METRIC in row:
        yield f"held-out {format_metric(row[VALIDATION_REWARD_METRIC], '.3f')}"
    else:
        yield from itertools.islice(format_evaluation_set_metrics(row), 1)
    if row.get("time/step_s") is not None and "tokens/trained" in row:
        yield f"{compute_trained_tokens_per_s([row]):,.0f} tokens/s"


def format_step_details(row: MetricRow) -> Iterator[str]:
    """Yield further figures of a step for the trainer's log."""
    if row.get("time/step_s") is not None:
        yield f"{row['time/step_s']:.1f} s"
    yield from format_evaluation_set_metrics(row)
    if "reward/mean" not in row:
        return
    waiting = compute_time_shares_by_system_part(row).get("generation", 0.0)
    if waiting >= MIN_SHOWN_SHARE:
        yield f"{waiting:.0%} waiting for generation"
    if "reward/std" in row:
        yield f"reward ± {format_metric(row['reward/std'], '.2f')}"
    if "groups/zero_variance" in row:
        yield f"zero-variance {format_metric(row['groups/zero_variance'], '.0%')}"
    if (length := row.get("reply/tokens_mean")) is not None:
        yield f"length {length:.0f}"
    if "entropy/mean" in row:
        yield f"entropy {format_metric(row['entropy/mean'], '.2f')}"
    if "staleness/mean" in row:
        mean = format_metric(row["staleness/mean"], ".1f")
        yield f"staleness {mean} (max {row.get('staleness/max')})"
    compared = "not compared"
    if row.get("logprob/compared_tokens"):
        compared = format_metric(row.get("logprob/engine_trainer_max_abs_diff"), ".1e")
    yield f"engine-trainer {compared}"


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last `width` values as blocks, from their least to their greatest."""
    shown = values[max(0, len(values) - width) :]
    if not shown:
        return ""
    low, top = min(shown), len(SPARKLINE_BLOCKS) - 1
    span = max(shown) - low or 1.0
    return "".join(SPARKLINE_BLOCKS[round((value - low) / span * top)] for value in shown)


def format_evaluation_set_metrics(row: MetricRow) -> Iterator[str]:
    """Yield evaluation metrics with their intervals, except the one that `held-out` shows."""
    for name, value in row.items():
        if not name.startswith(EVALUATION_METRIC_PREFIX) or name.endswith(INTERVAL_BOUND_SUFFIXES):
            continue
        set_name, _, metric = name.removeprefix(EVALUATION_METRIC_PREFIX).partition("/")
        if set_name == VALIDATION_SET_NAME and metric == "avg@1":
            continue
        low, high = (row.get(f"{name}{suffix}") for suffix in INTERVAL_BOUND_SUFFIXES)
        interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        yield f"{set_name} {metric} {format_metric(value, '.3f')}{interval}"


def compute_trained_tokens_per_s(rows: Sequence[MetricRow]) -> float:
    seconds = sum(row.get("time/step_s") or 0.0 for row in rows)
    return float(sum(row.get("tokens/trained") or 0 for row in rows) / max(seconds, 1e-9))


def estimate_remaining_s(rows: Sequence[MetricRow], total: int) -> float | None:
    times_s = [row["time/step_s"] for row in rows if row.get("time/step_s") and row["step"] > 0]
    if not times_s:
        return None
    return float(statistics.median(times_s[-MAX_PACE_STEPS:]) * max(0, total - rows[-1]["step"]))


def describe_step_times(times: StepTimes) -> str:
    ranked = sorted(times.shares.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{share:.0%} {part}" for part, share in ranked if share >= MIN_SHOWN_SHARE)
    return f"a step takes {times.mean_s:.1f} s" + (f": {parts}" if parts else "")


def describe_training(rows: Sequence[MetricRow]) -> Iterator[str]:
    """Yield what became of the reward, where the time went, and what taught nothing."""
    rewards = [reward for row in rows if (reward := row.get("reward/mean")) is not None]
    if n := min(MAX_COMPARED_STEPS, len(rewards) // 2):
        first, last = statistics.fmean(rewards[:n]), statistics.fmean(rewards[-n:])
        change = "fell" if last < first else "rose" if last > first else "did not change"
        steps = "step" if n == 1 else f"{n} steps"
        yield (
            f"its reward {change}: {first:.3f} in the first {steps}, {last:.3f} in the last {steps}"
        )
    paced = select_paced_rows(rows)
    if (times := measure_step_times(paced)) is None:
        return
    yield describe_step_times(times)
    if wasted := sum(row.get("groups/zero_variance") or 0.0 for row in paced):
        share = wasted / len(paced)
        yield f"{share:.0%} of the groups had no advantage (zero variance) and taught nothing"
