"""Diagnosis of a policy's collapse from trends of metrics (`areal-hpc why RUN --collapse`)."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from areal_hpc.errors import ShardError
from areal_hpc.metrics.alerts import (
    MAX_CUT_FRACTION,
    MAX_ENGINE_TRAINER_DIFF_NATS,
    MAX_REPEATED_FRACTION,
    MAX_REPLY_LENGTH_RATIO,
    MAX_ZERO_VARIANCE,
    MIN_ENTROPY_NATS,
)
from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.metrics.step_metrics import read_metrics, select_trained_rows
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.batch_episodes import read_batch_episodes, read_distinct_reply_share
from areal_hpc.view.formatting import (
    Answer,
    Finding,
    build_page_url_fragment,
    format_step_range,
    format_value,
    get_number,
    list_numbers,
)

MIN_STEPS_FOR_TREND = 6
MAX_WINDOW_STEPS = 5
MAX_READ_STEPS = 8
MIN_REWARD_FALL_SHARE_OF_RANGE = 0.2
MIN_ALL_BEST_SHARE = 0.5
DISTINCT_REPLIES_NAME = "distinct replies"


@dataclass(frozen=True, slots=True)
class Trend:
    start_mean: float
    end_mean: float
    by_step: Mapping[int, float]

    def find_lasting_halfway_step(self) -> int:
        """Return the first step from which the value stays beyond half of its change."""
        middle, falls = (self.start_mean + self.end_mean) / 2, self.end_mean < self.start_mean
        halfway_step = max(self.by_step)
        for step in sorted(self.by_step, reverse=True):
            value = self.by_step[step]
            if value > middle if falls else value < middle:
                break
            halfway_step = step
        return halfway_step


class CollapseSign(NamedTuple):
    """Trend of a metric that accompanies a collapse."""

    trend_name: str
    meaning: str
    kind: Literal["falls", "rises", "changes"]
    bound: float
    """Value that the end of the trend passes; for `changes`, the ratio that it passes."""
    ratio: float = 1.0
    """Ratio of the end to the start that the trend passes as well."""

    def is_shown_by(self, trend: Trend) -> bool:
        start, end = trend.start_mean, trend.end_mean
        ratio = end / start if abs(start) > 1e-12 else float("inf")
        match self.kind:
            case "falls":
                return ratio <= self.ratio and end <= self.bound
            case "rises":
                return ratio >= self.ratio and end >= self.bound
            case "changes":
                return not 1 / self.bound < ratio < self.bound


_ENGINE_DIFF = "logprob/engine_trainer_mean_abs_diff"
_SURE, _AGREE = "the policy is nearly sure of every token", "engine and trainer no longer agree"
_CUT = "replies reach their limit of tokens"
COLLAPSE_SIGNS = (
    CollapseSign("entropy/mean", _SURE, "falls", MIN_ENTROPY_NATS, 0.35),
    CollapseSign("entropy/mean", "the policy samples nearly at random", "rises", 1.0, 3.0),
    CollapseSign(DISTINCT_REPLIES_NAME, "samples of a task say the same", "falls", 0.5, 0.6),
    CollapseSign(
        "reply/repeated_fraction", "replies end in loops", "rises", MAX_REPEATED_FRACTION, 2.0
    ),
    CollapseSign(
        "reply/tokens_mean", "replies have another length", "changes", MAX_REPLY_LENGTH_RATIO
    ),
    CollapseSign("reply/cut_fraction", _CUT, "rises", MAX_CUT_FRACTION, 2.0),
    CollapseSign("groups/all_worst", "groups have only the worst reward", "rises", 0.5, 2.0),
    CollapseSign(
        "groups/zero_variance", "most groups teach nothing", "rises", MAX_ZERO_VARIANCE, 1.5
    ),
    CollapseSign(_ENGINE_DIFF, _AGREE, "rises", MAX_ENGINE_TRAINER_DIFF_NATS, 10.0),
)
SHOWN_TREND_NAMES = (*dict.fromkeys(sign.trend_name for sign in COLLAPSE_SIGNS), "groups/all_best")
SIGNS_OF_HARD_TASKS_ALONE = frozenset({"groups/all_worst", "groups/zero_variance"})
"""Signs that harder tasks alone cause; without another sign they show no collapse."""
SIGNS_HARMLESS_WHEN_SOLVED = frozenset(
    {"entropy/mean", DISTINCT_REPLIES_NAME, "groups/zero_variance"}
)
"""Signs that appear as well if the run has solved its tasks."""


def diagnose_collapse(paths: RunPaths) -> Answer:
    run, rows = paths.run_name, select_trained_rows(read_metrics(paths.metrics))
    if len(rows) < MIN_STEPS_FOR_TREND:
        return Answer(f"trained steps: {len(rows)}; at least {MIN_STEPS_FOR_TREND} show a trend")
    window = min(MAX_WINDOW_STEPS, len(rows) // 3)
    problems: list[str] = []
    distinct, to_read = _read_distinct_reply_shares(paths, rows, problems)
    trends = dict(_list_shown_trends(rows, distinct, window))
    meaning_by_trend = {
        sign.trend_name: sign.meaning
        for sign in COLLAPSE_SIGNS
        if sign.trend_name in trends and sign.is_shown_by(trends[sign.trend_name])
    }
    has_fallen, half_fall_step, course = _judge_reward(rows, window)
    best_groups = statistics.fmean(list_numbers(rows[-window:], "groups/all_best") or [0.0])
    is_solved = not has_fallen and best_groups >= MIN_ALL_BEST_SHARE
    serious = meaning_by_trend.keys() - (SIGNS_HARMLESS_WHEN_SOLVED if is_solved else set())
    is_degenerate = bool(serious - SIGNS_OF_HARD_TASKS_ALONE)
    has_collapsed = is_degenerate and (has_fallen or len(serious) >= 3)
    findings = [
        Finding(course, build_page_url_fragment("metrics", run, text="reward/")),
        *(
            _describe_trend(run, name, trend, rows, window, meaning_by_trend.get(name))
            for name, trend in trends.items()
        ),
        *to_read,
        *(Finding(f"not read: {problem}") for problem in problems[:3]),
    ]
    meanings = ", ".join(meaning_by_trend.values())
    if has_collapsed:
        since = min(trends[name].find_lasting_halfway_step() for name in serious)
        first = min(since, half_fall_step) if has_fallen else since
        hints = (
            f"go back to a checkpoint of step {first - 1} or before",
            "lower trainer.optimizer.lr, raise rollout.sampling.temperature or "
            "trainer.objective.clip_high, or subtract reward for loops and cut replies",
        )
        headline = f"the policy collapses since about step {since}: {meanings}"
        return Answer(headline, tuple(findings), hints, is_well=False)
    headline = "the policy does not collapse"
    if is_solved:
        headline += f", it has solved its tasks{f': {meanings}' if meanings else ''}"
    elif has_fallen:
        headline = (
            "the reward fell, but not by a collapse: entropy, length, repetition and distinct "
            f"replies hold; areal-hpc why RUN --step {half_fall_step} compares"
        )
    elif meanings:
        headline += f" yet, the reward holds; but {meanings}"
    return Answer(headline, tuple(findings))


def _read_distinct_reply_shares(
    paths: RunPaths, rows: Sequence[MetricRow], problems: list[str]
) -> tuple[dict[int, float], list[Finding]]:
    """Return the shares by step, spread over the run, and the worst episode of the last step."""
    last = len(rows) - 1
    indices = {number * last // (MAX_READ_STEPS - 1) for number in range(MAX_READ_STEPS)}
    shares: dict[int, float] = {}
    to_read: list[Finding] = []
    for step in [rows[index]["step"] for index in sorted(indices)]:
        episodes = read_batch_episodes(paths, [step], problems)
        try:
            share = read_distinct_reply_share(paths, episodes)
        except ShardError as error:
            problems.append(str(error))
            continue
        if share is not None:
            shares[step] = share
            worst = min(episodes, key=lambda episode: episode.mean_row_reward)
            page = build_page_url_fragment("trajectory", paths.run_name, row=worst.first_row_name)
            text = f"to read: {worst.title}, reward {worst.mean_row_reward:g}"
            to_read = [Finding(text, page)]
    return shares, to_read


def _list_shown_trends(
    rows: Sequence[MetricRow], distinct_shares: Mapping[int, float], window: int
) -> Iterator[tuple[str, Trend]]:
    for name in SHOWN_TREND_NAMES:
        if name == DISTINCT_REPLIES_NAME:
            if len(distinct_shares) >= 2:
                first, *_, last = (distinct_shares[step] for step in sorted(distinct_shares))
                yield name, Trend(first, last, distinct_shares)
            continue
        start, end = (list_numbers(part, name) for part in (rows[:window], rows[-window:]))
        if start and end:
            values = {row["step"]: get_number(row, name) for row in rows}
            by_step = {step: value for step, value in values.items() if value is not None}
            yield name, Trend(statistics.fmean(start), statistics.fmean(end), by_step)


def _describe_trend(
    run: str, name: str, trend: Trend, rows: Sequence[MetricRow], window: int, meaning: str | None
) -> Finding:
    ends = trend.start_mean, trend.end_mean
    if name == DISTINCT_REPLIES_NAME:
        first, last = min(trend.by_step), max(trend.by_step)
        text = f"{name} of a group: {ends[0]:.0%} at step {first}, {ends[1]:.0%} at step {last}"
        page = build_page_url_fragment("trajectories", run, where=f"step={last}", sort="ticket")
    else:
        before, after = (format_value(name, value) for value in ends)
        text = f"{name}: {before} ({format_step_range(rows[:window])}), {after} "
        text += f"({format_step_range(rows[-window:])})"
        page = build_page_url_fragment("metrics", run, text=name)
    if meaning:
        text += f": {meaning}, half of the way at step {trend.find_lasting_halfway_step()}"
    return Finding(text, page)


def _judge_reward(rows: Sequence[MetricRow], window: int) -> tuple[bool, int, str]:
    """Return whether the mean of the last `window` steps fell, since which step, and a sentence."""
    rewards = {row["step"]: get_number(row, "reward/mean") or 0.0 for row in rows}
    steps, values = list(rewards), list(rewards.values())
    means = [statistics.fmean(values[end - window : end]) for end in range(window, len(rows) + 1)]
    best = max(range(len(means)), key=lambda index: means[index])
    spread = statistics.fmean(list_numbers(rows, "reward/standard_error") or [0.0])
    reward_range = max(values) - min(values)
    least = max(MIN_REWARD_FALL_SHARE_OF_RANGE * reward_range, 2 * spread, 1e-9)
    has_fallen = means[best] - means[-1] > least
    best_step = steps[best + window - 1]
    text = f"the reward is at its best, {means[best]:.3f}, at step {best_step}"
    if best_step != steps[-1]:
        text = (
            f"the reward {'fell' if has_fallen else 'went'} from {means[best]:.3f}, its best, "
            f"at step {best_step} to {means[-1]:.3f} at step {steps[-1]}"
        )
    if held_out := list_numbers(rows, "eval/reward"):
        last = max(row["step"] for row in rows if get_number(row, "eval/reward") is not None)
        text += f"; held-out reward {max(held_out):.3f} at best, {held_out[-1]:.3f} at step {last}"
    course = Trend(means[best], means[-1], rewards)
    return has_fallen, course.find_lasting_halfway_step(), text
