"""Whether a run's policy collapses (`areal-hpc why RUN --collapse`)."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_hpc.errors import ShardError
from areal_hpc.metrics.step_line import MetricRow
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.answers.answer import Answer, Finding, build_page_url_fragment
from areal_hpc.view.batch_episodes import (
    BatchEpisode,
    read_batch_episodes,
    read_distinct_reply_share,
)
from areal_hpc.view.metric_values import (
    format_step_range,
    format_value,
    get_number,
    list_numbers,
    select_trained_rows,
)

MIN_STEPS_FOR_TREND = 6
MAX_WINDOW_STEPS = 5
MAX_READ_STEPS = 8
MIN_REWARD_FALL_SHARE_OF_RANGE = 0.2
MIN_ALL_BEST_SHARE = 0.5
DISTINCT_REPLIES_NAME = "distinct replies"


@dataclass(frozen=True, slots=True)
class Trend:
    name: str
    start_mean: float
    end_mean: float
    by_step: Mapping[int, float]

    @property
    def ratio(self) -> float:
        return self.end_mean / self.start_mean if abs(self.start_mean) > 1e-12 else float("inf")

    def find_lasting_halfway_step(self) -> int:
        """The first step at which the number had gone half of the way, and never went back."""
        middle, falls = (self.start_mean + self.end_mean) / 2, self.end_mean < self.start_mean
        found = max(self.by_step)
        for step in sorted(self.by_step, reverse=True):
            value = self.by_step[step]
            if value > middle if falls else value < middle:
                break
            found = step
        return found


@dataclass(frozen=True, slots=True)
class CollapseSignRule:
    trend_name: str
    meaning: str
    kind: Literal["falls", "rises", "changes"]
    ratio_threshold: float
    """The last of the first, from which it is one; of `changes`, or its inverse."""
    end_mean_threshold: float = 0.0

    def holds(self, trend: Trend) -> bool:
        match self.kind:
            case "falls":
                return (
                    trend.ratio <= self.ratio_threshold
                    and trend.end_mean <= self.end_mean_threshold
                )
            case "rises":
                return (
                    trend.ratio >= self.ratio_threshold
                    and trend.end_mean >= self.end_mean_threshold
                )
            case "changes":
                return not 1 / self.ratio_threshold < trend.ratio < self.ratio_threshold


ENTROPY_FALL_RULE = CollapseSignRule(
    "entropy/mean", "the policy is nearly sure of every token", "falls", 0.35, 0.3
)
COLLAPSE_SIGN_RULES = (
    ENTROPY_FALL_RULE,
    CollapseSignRule("entropy/mean", "the policy says anything", "rises", 3.0, 1.0),
    CollapseSignRule(DISTINCT_REPLIES_NAME, "samples of a task say the same", "falls", 0.6, 0.5),
    CollapseSignRule("reply/repeated_fraction", "replies end in loops", "rises", 2.0, 0.25),
    CollapseSignRule("reply/tokens_mean", "replies have another length", "changes", 3.0),
    CollapseSignRule(
        "reply/cut_fraction", "replies reach their limit of tokens", "rises", 2.0, 0.3
    ),
    CollapseSignRule("groups/all_worst", "groups have only the worst reward", "rises", 2.0, 0.5),
    CollapseSignRule("groups/zero_variance", "most groups teach nothing", "rises", 1.5, 0.7),
    CollapseSignRule(
        "logprob/engine_trainer_mean_abs_diff",
        "engine and trainer no longer agree",
        "rises",
        10.0,
        0.05,
    ),
)
SHOWN_TREND_NAMES = tuple(
    dict.fromkeys([*(rule.trend_name for rule in COLLAPSE_SIGN_RULES), "groups/all_best"])
)
SIGNS_OF_HARD_TASKS_ALONE = frozenset({"groups/all_worst", "groups/zero_variance"})
"""Signs that harder tasks alone bring about: with no other one they are no collapse."""
SIGNS_HARMLESS_WHEN_SOLVED = frozenset(
    {"entropy/mean", DISTINCT_REPLIES_NAME, "groups/zero_variance"}
)
"""Signs that a run which has solved its tasks shows as well."""


def diagnose_collapse(paths: RunPaths) -> Answer:
    rows = select_trained_rows(read_metrics(paths.metrics))
    problems: list[str] = []
    steps = choose_evenly_spread_steps([row["step"] for row in rows], MAX_READ_STEPS)
    episodes = read_batch_episodes(paths, steps, problems)
    distinct: dict[int, float] = {}
    for step in steps:
        try:
            share = read_distinct_reply_share(paths, [one for one in episodes if one.step == step])
        except ShardError as error:
            problems.append(str(error))
            continue
        if share is not None:
            distinct[step] = share
    return judge_collapse(paths.run_name, rows, distinct, episodes, problems)


def choose_evenly_spread_steps(steps: Sequence[int], count: int) -> list[int]:
    if len(steps) <= count:
        return list(steps)
    return sorted({steps[place * (len(steps) - 1) // (count - 1)] for place in range(count)})


def judge_collapse(
    run: str,
    rows: Sequence[MetricRow],
    distinct_share_by_step: Mapping[int, float],
    episodes: Sequence[BatchEpisode] = (),
    problems: Sequence[str] = (),
) -> Answer:
    if len(rows) < MIN_STEPS_FOR_TREND:
        return Answer(f"trained steps: {len(rows)}; at least {MIN_STEPS_FOR_TREND} show a trend")
    window = min(MAX_WINDOW_STEPS, len(rows) // 3)
    trends = {one.name: one for one in _list_shown_trends(rows, distinct_share_by_step, window)}
    signs = [
        (rule, trends[rule.trend_name])
        for rule in COLLAPSE_SIGN_RULES
        if rule.trend_name in trends and rule.holds(trends[rule.trend_name])
    ]
    reward = RewardSummary.measure(rows, window)
    is_solved = not reward.has_fallen and _are_tasks_solved(rows[-window:])
    serious = [
        one for one in signs if not (is_solved and one[0].trend_name in SIGNS_HARMLESS_WHEN_SOLVED)
    ]
    is_degenerate = any(rule.trend_name not in SIGNS_OF_HARD_TASKS_ALONE for rule, _ in serious)
    has_collapsed = is_degenerate and (reward.has_fallen or len(serious) >= 3)
    since = min((trend.find_lasting_halfway_step() for _, trend in serious), default=0)
    findings = [Finding(reward.text, build_page_url_fragment("metrics", run, text="reward/"))]
    findings += [_describe_trend(run, trend, rows, window, signs) for trend in trends.values()]
    findings += list(_suggest_last_step_worst_episode(run, episodes, distinct_share_by_step))
    findings += [Finding(f"not read: {one}") for one in problems[:3]]
    return Answer(
        _build_headline(reward, signs, since if has_collapsed else None, is_solved=is_solved),
        tuple(findings),
        _list_hints(reward, since) if has_collapsed else (),
        is_well=not has_collapsed,
    )


def _list_shown_trends(
    rows: Sequence[MetricRow], distinct_share_by_step: Mapping[int, float], window: int
) -> Iterator[Trend]:
    for name in SHOWN_TREND_NAMES:
        if name == DISTINCT_REPLIES_NAME:
            if len(distinct_share_by_step) >= 2:
                yield Trend(
                    name,
                    distinct_share_by_step[min(distinct_share_by_step)],
                    distinct_share_by_step[max(distinct_share_by_step)],
                    distinct_share_by_step,
                )
            continue
        first, last = (list_numbers(ones, name) for ones in (rows[:window], rows[-window:]))
        by_step = {
            row["step"]: value for row in rows if (value := get_number(row, name)) is not None
        }
        if first and last:
            yield Trend(name, statistics.fmean(first), statistics.fmean(last), by_step)


def _are_tasks_solved(rows: Sequence[MetricRow]) -> bool:
    return statistics.fmean(list_numbers(rows, "groups/all_best") or [0.0]) >= MIN_ALL_BEST_SHARE


def _format_trend_value(metric_name: str, value: float) -> str:
    return (
        f"{value:.0%}" if metric_name == DISTINCT_REPLIES_NAME else format_value(metric_name, value)
    )


def _describe_trend(
    run: str,
    trend: Trend,
    rows: Sequence[MetricRow],
    window: int,
    signs: Sequence[tuple[CollapseSignRule, Trend]],
) -> Finding:
    first, last = (
        _format_trend_value(trend.name, one) for one in (trend.start_mean, trend.end_mean)
    )
    meaning = next((rule.meaning for rule, one in signs if one.name == trend.name), "")
    if trend.name == DISTINCT_REPLIES_NAME:
        steps = sorted(trend.by_step)
        between = f"{first} at step {steps[0]}, {last} at step {steps[-1]}"
        text = f"{DISTINCT_REPLIES_NAME} of a group: {between}"
        page = build_page_url_fragment(
            "trajectories", run, where=f"step={steps[-1]}", sort="ticket"
        )
    else:
        text = f"{trend.name}: {first} ({format_step_range(rows[:window])}), {last} "
        text += f"({format_step_range(rows[-window:])})"
        page = build_page_url_fragment("metrics", run, text=trend.name)
    if meaning:
        text += f": {meaning}, half of the way at step {trend.find_lasting_halfway_step()}"
    return Finding(text, page)


@dataclass(frozen=True, slots=True)
class RewardSummary:
    best: float
    best_step: int
    """The last step of the best window."""
    last: float
    last_step: int
    has_fallen: bool
    half_fall_step: int
    """The first step at which half of the fall from the best had happened, for good."""
    held_out_text: str

    @classmethod
    def measure(cls, rows: Sequence[MetricRow], window: int) -> "RewardSummary":
        rewards = [get_number(row, "reward/mean") or 0.0 for row in rows]
        means = [
            statistics.fmean(rewards[end - window : end]) for end in range(window, len(rows) + 1)
        ]
        best = max(range(len(means)), key=lambda place: means[place])
        fall = means[best] - means[-1]
        spread = statistics.fmean(list_numbers(rows, "reward/standard_error") or [0.0])
        least = max(
            MIN_REWARD_FALL_SHARE_OF_RANGE * (max(rewards) - min(rewards)), 2 * spread, 1e-9
        )
        judged = [
            (row["step"], value)
            for row in rows
            if (value := get_number(row, "eval/reward")) is not None
        ]
        held_out = (
            f"; held-out reward {max(value for _, value in judged):.3f} at best, "
            f"{judged[-1][1]:.3f} at step {judged[-1][0]}"
            if judged
            else ""
        )
        best_step = rows[best + window - 1]["step"]
        last_step = rows[-1]["step"]
        since = {row["step"]: reward for row, reward in zip(rows, rewards, strict=True)}
        course = Trend("reward/mean", means[best], means[-1], since)
        return cls(
            means[best],
            best_step,
            means[-1],
            last_step,
            fall > least,
            course.find_lasting_halfway_step(),
            held_out,
        )

    @property
    def text(self) -> str:
        if self.best_step == self.last_step:
            return f"the reward is at its best, {self.best:.3f}, at step {self.best_step}" + (
                self.held_out_text
            )
        fell = "fell" if self.has_fallen else "went"
        return (
            f"the reward {fell} from {self.best:.3f}, its best, at step {self.best_step} to "
            f"{self.last:.3f} at step {self.last_step}{self.held_out_text}"
        )


def _build_headline(
    reward: RewardSummary,
    signs: Sequence[tuple[CollapseSignRule, Trend]],
    since: int | None,
    *,
    is_solved: bool,
) -> str:
    told = ", ".join(dict.fromkeys(rule.meaning for rule, _ in signs))
    if since is not None:
        return f"the policy collapses since about step {since}: {told}"
    if is_solved:
        return f"the policy does not collapse, it has solved its tasks{f': {told}' if told else ''}"
    if signs and not reward.has_fallen:
        return f"the policy does not collapse yet, the reward holds; but {told}"
    if reward.has_fallen:
        return (
            "the reward fell, but not by a collapse: entropy, length, repetition and distinct "
            f"replies hold; areal-hpc why RUN --step {reward.half_fall_step} compares"
        )
    return "the policy does not collapse"


def _list_hints(reward: RewardSummary, since: int) -> tuple[str, ...]:
    first = min(since, reward.half_fall_step) if reward.has_fallen else since
    return (
        f"go back to a checkpoint of step {first - 1} or before",
        "lower trainer.optimizer.lr, raise rollout.sampling.temperature or "
        "trainer.objective.clip_high, or subtract reward for loops and cut replies",
    )


def _suggest_last_step_worst_episode(
    run: str, episodes: Sequence[BatchEpisode], distinct_share_by_step: Mapping[int, float]
) -> Iterator[Finding]:
    if not distinct_share_by_step:
        return
    last = [one for one in episodes if one.step == max(distinct_share_by_step)]
    if last:
        worst = min(last, key=lambda one: one.mean_row_reward)
        text = f"to read: {worst.title}, reward {worst.mean_row_reward:g}"
        yield Finding(text, build_page_url_fragment("trajectory", run, row=worst.first_row_name))
