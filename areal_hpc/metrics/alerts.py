"""Alerts: what the metrics of a step, and of the steps before, say of a run's health. Pure.

`docs/metrics.md` lists the rules from here, `recipe/sections/alerts.py` has their bounds.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from areal_hpc.recipe.sections.alerts import AlertsConfig

TrainedStepRow = Mapping[str, Any]
"""A row of `metrics.jsonl` of a step that trained something."""
AlertLevel = Literal["failure", "note"]

MIN_ALERT_WINDOW_ROWS = 200
"""The newest rows that are looked at: cheap after each step, and enough unless a rule asks for more
steps in a row."""
STEPS_BEFORE_REPEATED_ALERT = 10
COMPARED_STEPS_BEFORE = 20
MIN_COMPARED_STEPS_BEFORE = 5
MIN_SOLVED_GROUPS = 0.5
MIN_BEST_SHARE_OF_EQUAL_GROUPS = 0.9
"""Of the groups that teach nothing, the share at the best one that makes the tasks solved."""
MIN_REWARD_DROP_SHARE_OF_RANGE = 0.1
MIN_FAILED_TRIES_IN_STEP = 8
READ_ROWS_HINT = "read some with areal-hpc shards show RUN 0"


@dataclass(frozen=True, slots=True)
class Alert:
    rule: str
    level: AlertLevel
    step: int
    """The step since which it holds."""
    message: str
    hint: str


class Finding(NamedTuple):
    message: str
    hint: str
    step: int | None = None
    """The step since which it holds; None for the newest."""
    level: AlertLevel | None = None
    """None for that of the rule."""


RuleCheck = Callable[[Sequence[TrainedStepRow], AlertsConfig], Finding | None]
"""Given rows of trained steps, oldest first and at least one."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    name: str
    level: AlertLevel
    config_keys: tuple[str, ...]
    """Its bounds, below `alerts` in a recipe."""
    metrics: tuple[str, ...]
    """What it looks at, by names of the catalogue."""
    meaning: str
    check: RuleCheck


def find_alerts(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> list[Alert]:
    """What the rows of `metrics.jsonl` say of the run as of the newest one, failures first."""
    trained = [row for row in rows[-get_alert_window_rows(config) :] if row.get("episodes")]
    found = []
    for rule in RULES if trained else ():
        if (finding := rule.check(trained, config)) is not None:
            step = trained[-1]["step"] if finding.step is None else finding.step
            level = finding.level or rule.level
            found.append(Alert(rule.name, level, step, finding.message, finding.hint))
    return sorted(found, key=lambda alert: alert.level != "failure")


def get_alert_window_rows(config: AlertsConfig) -> int:
    return max(MIN_ALERT_WINDOW_ROWS, config.no_signal_steps or 0)


class AlertTracker:
    def __init__(self, config: AlertsConfig) -> None:
        self._config = config
        self._last_step: dict[tuple[str, AlertLevel], int] = {}

    def take_new_alerts(self, rows: Sequence[TrainedStepRow]) -> list[Alert]:
        """Alerts as of the newest row, but for those of the last `STEPS_BEFORE_REPEATED_ALERT`."""
        new = []
        for alert in find_alerts(rows, self._config):
            key, step = (alert.rule, alert.level), int(rows[-1]["step"])
            if step - self._last_step.get(key, -STEPS_BEFORE_REPEATED_ALERT - 1) > (
                STEPS_BEFORE_REPEATED_ALERT
            ):
                new.append(alert)
            self._last_step[key] = step
        return new


def check_learning_signal(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> Finding | None:
    """Steps in a row that taught nothing; a note if that is because the tasks are solved."""
    wanted = config.no_signal_steps
    streak = 0
    for row in reversed(rows):
        if not _lacks_learning_signal(row, config):
            break
        streak += 1
    if wanted is None or streak < wanted:
        return None
    last, first = rows[-1], rows[-streak]
    since = f"steps {first['step']} to {last['step']}"
    equal = _get_zero_variance_share(last)
    if all(map(_is_mostly_solved, rows[-wanted:])):
        return Finding(
            f"the tasks are solved: {since} have {equal:.0%} of groups without advantage, "
            "nearly all of them at the best one",
            "stop here, or train on harder tasks",
            first["step"],
            "note",
        )
    if equal < config.max_zero_variance:
        return Finding(
            f"{since} taught nothing: the gradient is zero although rewards differ",
            "look at ratio/clip_fraction and importance_weight/out_of_bounds_fraction: "
            "every token may be clipped or masked",
            first["step"],
        )
    mean, worst = last.get("reward/mean"), last.get("groups/all_worst") or 0.0
    rewards = "" if mean is None else f", the mean reward is {mean:.3g}"
    if worst:
        rewards += f", {worst:.0%} of groups have only the worst reward"
    return Finding(
        f"{since} taught nothing: no reply has an advantage in {equal:.0%} of groups{rewards}",
        "read replies with areal-hpc shards show RUN 0, then check the agent's reward and "
        "the learning rate",
        first["step"],
    )


def _lacks_learning_signal(row: TrainedStepRow, config: AlertsConfig) -> bool:
    norms = [row[name] for name in ("grad_norm", "critic/grad_norm") if name in row]
    lacks_gradient = bool(norms) and all(norm == 0 for norm in norms)
    return lacks_gradient or _get_zero_variance_share(row) >= config.max_zero_variance


def _get_zero_variance_share(row: TrainedStepRow) -> float:
    share: float = row.get("groups/zero_variance") or 0.0
    return share


def _is_mostly_solved(row: TrainedStepRow) -> bool:
    equal, best = _get_zero_variance_share(row), row.get("groups/all_best") or 0.0
    return equal > 0 and best >= MIN_BEST_SHARE_OF_EQUAL_GROUPS * equal


def check_reward_drop(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> Finding | None:
    """A fall of the reward from which it has not recovered: of several the first."""
    if config.max_reward_drop_std is None:
        return None
    known = [row for row in rows if row.get("reward/mean") is not None]
    rewards = np.array([row["reward/mean"] for row in known], dtype=float)
    highest_since, found = -math.inf, None
    for at in range(len(known) - 1, 0, -1):
        highest_since = max(highest_since, rewards[at])
        before = slice(max(0, at - COMPARED_STEPS_BEFORE), at)
        mean = float(rewards[before].mean())
        if highest_since >= mean:  # mostly: the rest takes longer
            continue
        # A step's mean reward varies from step to step, and is known only to the precision that its
        # groups allow: the larger of the two counts.
        errors = np.array([row.get("reward/standard_error") or 0.0 for row in known[before]])
        of_groups = math.sqrt((errors**2).mean() * (1 + 1 / len(errors)))
        of_steps = float(rewards[before].std(ddof=1)) if len(errors) > 1 else 0.0
        seen = known[before.start : at + 1]
        lowest = [row["reward/min"] for row in seen if row.get("reward/min") is not None]
        highest = [row["reward/max"] for row in seen if row.get("reward/max") is not None]
        reward_range = max(highest) - min(lowest) if lowest and highest else 0.0
        bound = mean - max(
            config.max_reward_drop_std * max(of_groups, of_steps),
            MIN_REWARD_DROP_SHARE_OF_RANGE * reward_range,
        )
        if highest_since < bound:
            since = known[at]["step"]
            found = Finding(
                f"the reward fell at step {since} from {mean:.3g}, the mean of the "
                f"{at - before.start} steps before, below {bound:.3g}; now it is "
                f"{rewards[-1]:.3g}",
                "lower trainer.optimizer.lr and go back to a checkpoint before that step",
                since,
            )
    return found


def check_engine_mismatch(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> Finding | None:
    name, row = "logprob/engine_trainer_mean_abs_diff", rows[-1]
    bound = config.max_engine_trainer_diff
    if bound is None or not row.get("logprob/compared_tokens") or name not in row:
        return None
    diff = row[name]
    if diff is not None and diff <= bound:
        return None
    found = "is not finite" if diff is None else f"is {diff:.2g} nats on average, above {bound:g}"
    return Finding(
        f"engine and trainer disagree: the difference of a token's log-probability {found}",
        "compare dtype and model files of both, and SGLang's options; weights that a high "
        "learning rate has blown up also do this",
    )


def check_failing_agents(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> Finding | None:
    row, bound = rows[-1], config.max_failed_episodes
    failures, ended_well = row.get("episode/failures") or 0, _estimate_successful_episodes(row)
    if bound is None or failures < MIN_FAILED_TRIES_IN_STEP:
        return None
    share = failures / (failures + ended_well)
    if share <= bound:
        return None
    return Finding(
        f"{failures} tries of episodes failed, {ended_well:.0f} ended well: {share:.0%} failed, "
        f"above {bound:.0%}",
        "areal-hpc why RUN names their errors",
    )


def _estimate_successful_episodes(row: TrainedStepRow) -> float:
    """Training episodes that ended well since the row before, in the batch and in other tickets.

    Another ticket is taken to have as many episodes as one of the batch. Failures that earn a
    reward are among the episodes of a ticket; one of nothing else is dropped as failed.
    """
    rewarded = row.get("episode/rewarded_failures") or 0
    kinds = ("filtered", "stale_dropped", "stale_requeued", *(("failed",) if rewarded else ()))
    others = sum(row.get(f"tickets/{kind}") or 0 for kind in kinds)
    episodes: float = row["episodes"]
    per_ticket = episodes / row["groups"] if row.get("groups") else 0.0
    ended_well: float = episodes + others * per_ticket - rewarded
    return max(0.0, ended_well)


def check_reply_length(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> Finding | None:
    name, bound = "reply/tokens_mean", config.max_reply_length_ratio
    before = [row[name] for row in rows[-COMPARED_STEPS_BEFORE - 1 : -1] if row.get(name)]
    now = rows[-1].get(name)
    if bound is None or not now or len(before) < MIN_COMPARED_STEPS_BEFORE:
        return None
    ratio = now / statistics.fmean(before)
    if 1 / bound <= ratio <= bound:
        return None
    return Finding(
        f"replies have {now:.0f} tokens, {ratio:.2g} times the mean of the {len(before)} steps "
        "before",
        READ_ROWS_HINT,
    )


def check_unrewarded_replies(
    rows: Sequence[TrainedStepRow], config: AlertsConfig
) -> Finding | None:
    count = rows[-1].get("reply/unrewarded")
    if not count:
        return None
    return Finding(
        f"{count} replies of this step's episodes are not trained: no reward reaches them",
        "return one number for the episode, reward these replies, or set "
        "rollout.agent.credit=chronological",
    )


def check_bound(
    rows: Sequence[TrainedStepRow],
    config: AlertsConfig,
    *,
    metric: str,
    key: str,
    message: str,
    hint: str,
    scale: float = 1.0,
) -> Finding | None:
    """Compare the newest value of a metric, times `scale`, with a key `max_...` or `min_...`."""
    value, bound = rows[-1].get(metric), getattr(config, key)
    if value is None or bound is None:
        return None
    value *= scale
    if value <= bound if key.startswith("max") else value >= bound:
        return None
    return Finding(message.format(value=value, bound=bound), hint)


def check_entropy(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> Finding | None:
    """A low entropy, unless most groups have the best reward alone: nothing is left to explore."""
    if (rows[-1].get("groups/all_best") or 0.0) >= MIN_SOLVED_GROUPS:
        return None
    return check_bound(
        rows,
        config,
        metric="entropy/mean",
        key="min_entropy",
        message="the entropy of sampled tokens is {value:.2g} nats, below {bound:g}",
        hint="raise rollout.sampling.temperature or trainer.objective.clip_high",
    )


def _make_bound_rule(
    rule: str, metric: str, key: str, meaning: str, message: str, hint: str, scale: float = 1.0
) -> AlertRule:
    check = partial(check_bound, metric=metric, key=key, message=message, hint=hint, scale=scale)
    return AlertRule(rule, "note", (key,), (metric,), meaning, check)


RULES: tuple[AlertRule, ...] = (
    AlertRule(
        "no_signal",
        "failure",
        ("no_signal_steps", "max_zero_variance"),
        (
            "grad_norm",
            "critic/grad_norm",
            "groups/zero_variance",
            "groups/all_best",
            "groups/all_worst",
        ),
        "steps in a row whose gradient is zero (a critic's too), or in nearly all of whose groups "
        "no trained token has an advantage; "
        "only a note where rewards have varied and these groups have the best one: the tasks are "
        "solved",
        check_learning_signal,
    ),
    AlertRule(
        "reward_drop",
        "failure",
        ("max_reward_drop_std",),
        ("reward/mean", "reward/standard_error", "reward/min", "reward/max"),
        "the reward fell by so many standard deviations of the 20 steps before, and by a tenth of "
        "the range of rewards, and has not recovered",
        check_reward_drop,
    ),
    AlertRule(
        "engine_mismatch",
        "failure",
        ("max_engine_trainer_diff",),
        ("logprob/engine_trainer_mean_abs_diff", "logprob/compared_tokens"),
        "engine and trainer give tokens other probabilities under the same weights",
        check_engine_mismatch,
    ),
    AlertRule(
        "failing_agents",
        "failure",
        ("max_failed_episodes",),
        (
            "episode/failures",
            "episode/rewarded_failures",
            "episodes",
            "groups",
            "tickets/filtered",
            "tickets/stale_dropped",
            "tickets/stale_requeued",
            "tickets/failed",
        ),
        "more than this share of the tries of episodes failed, and at least "
        f"{MIN_FAILED_TRIES_IN_STEP}; those of tickets that were filtered out or too old count as "
        "well",
        check_failing_agents,
    ),
    AlertRule(
        "low_entropy",
        "note",
        ("min_entropy",),
        ("entropy/mean", "groups/all_best"),
        "samples of a task hardly differ, and most tasks are not solved",
        check_entropy,
    ),
    AlertRule(
        "reply_length",
        "note",
        ("max_reply_length_ratio",),
        ("reply/tokens_mean",),
        "replies are so many times longer, or shorter, than in the 20 steps before",
        check_reply_length,
    ),
    _make_bound_rule(
        "repetition",
        "reply/repeated_fraction",
        "max_repeated_fraction",
        "replies end in loops",
        "{value:.0%} of the end of replies is repetition, above {bound:.0%}",
        READ_ROWS_HINT,
    ),
    _make_bound_rule(
        "cut_replies",
        "reply/cut_fraction",
        "max_cut_fraction",
        "replies reach their limit of tokens",
        "{value:.0%} of replies reached their limit of tokens, above {bound:.0%}",
        "read some with areal-hpc shards show RUN 0; if they loop, areal-hpc why RUN --collapse, "
        "else raise rollout.sampling.max_new_tokens",
    ),
    AlertRule(
        "unrewarded_replies",
        "note",
        (),
        ("reply/unrewarded",),
        "rewards name replies, and none of them reaches some others, which are not trained",
        check_unrewarded_replies,
    ),
    _make_bound_rule(
        "full_disk",
        "disk/free_bytes",
        "min_free_disk_gib",
        "little room is left on the storage of the run directory",
        "{value:.2g} GiB are free on the storage of the run, below {bound:g} GiB",
        "make room there: a checkpoint that does not fit ends the run",
        2.0**-30,
    ),
    _make_bound_rule(
        "slow_cell",
        "generation/slowest_cell_ratio",
        "min_cell_speed_ratio",
        "one cell generates much slower than another",
        "the slowest cell generates at {value:.0%} of the fastest one's speed, below {bound:.0%}",
        "areal-hpc status RUN names its node; exclude it if that lasts",
    ),
)
