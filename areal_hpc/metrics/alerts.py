"""Alerts: rules that judge the health of a run by the metrics of its newest steps. Pure.

`areal-hpc why RUN --collapse` uses the same bounds.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from areal_hpc.metrics.reward_hacking import find_hacking_evidence

TrainedStepRow = Mapping[str, Any]
"""Row of `metrics.jsonl` of a step that trained something."""
AlertLevel = Literal["failure", "note"]

NO_SIGNAL_STEPS = 3
MAX_ZERO_VARIANCE = 0.9
MAX_REWARD_DROP_STD = 3.0
MIN_REWARD_DROP_SHARE_OF_RANGE = 0.1
MAX_ENGINE_TRAINER_DIFF_NATS = 0.1
MAX_FAILED_SHARE_OF_TRIES = 0.5
MIN_FAILED_TRIES_IN_STEP = 8
MIN_ENTROPY_NATS = 0.05
MAX_REPLY_LENGTH_RATIO = 2.0
MAX_REPEATED_FRACTION = 0.5
MAX_CUT_FRACTION = 0.25
MIN_FREE_DISK_GIB = 2.0
MIN_CELL_SPEED_RATIO = 0.5
MIN_SOLVED_GROUPS = 0.5
MIN_BEST_SHARE_OF_EQUAL_GROUPS = 0.9
"""Share of zero-variance groups with the best reward from which the tasks count as solved."""

ALERT_WINDOW_ROWS = 200
"""Number of newest rows that rules read: few enough to judge after each step."""
STEPS_BEFORE_REPEATED_ALERT = 10
COMPARED_STEPS_BEFORE = 20
MIN_COMPARED_STEPS_BEFORE = 5
READ_ROWS_HINT = "read some with areal-hpc shards show RUN 0"


@dataclass(frozen=True, slots=True)
class Alert:
    rule: str
    level: AlertLevel
    step: int
    """Step since which the alert holds."""
    message: str
    hint: str


class Finding(NamedTuple):
    message: str
    hint: str
    step: int | None = None
    """Step since which the alert holds; None for the newest."""
    level: AlertLevel | None = None
    """None for the level of the rule."""


RuleCheck = Callable[[Sequence[TrainedStepRow]], Finding | None]
"""Function of rows of trained steps: at least one, oldest first, after the row of step 0."""


class AlertRule(NamedTuple):
    name: str
    level: AlertLevel
    check: RuleCheck


def find_alerts(rows: Sequence[TrainedStepRow], off: Collection[str] = ()) -> list[Alert]:
    """Return the alerts that hold at the newest row, failures first; `off` names rules to skip."""
    window = rows[-ALERT_WINDOW_ROWS:]
    trained = [row for row in window if row.get("episodes") or row["step"] == 0]
    if not trained or not trained[-1].get("episodes"):
        return []
    alerts = []
    for rule in RULES:
        if rule.name not in off and (finding := rule.check(trained)) is not None:
            step = trained[-1]["step"] if finding.step is None else finding.step
            level = finding.level or rule.level
            alerts.append(Alert(rule.name, level, step, finding.message, finding.hint))
    return sorted(alerts, key=lambda alert: alert.level != "failure")


class AlertTracker:
    def __init__(self, off: Collection[str] = ()) -> None:
        self._off = off
        self._last_step: dict[tuple[str, AlertLevel], int] = {}

    def take_new_alerts(self, rows: Sequence[TrainedStepRow]) -> list[Alert]:
        """Return alerts that held in none of the last `STEPS_BEFORE_REPEATED_ALERT` steps."""
        new = []
        for alert in find_alerts(rows, self._off):
            key, step = (alert.rule, alert.level), int(rows[-1]["step"])
            if step - self._last_step.get(key, -STEPS_BEFORE_REPEATED_ALERT - 1) > (
                STEPS_BEFORE_REPEATED_ALERT
            ):
                new.append(alert)
            self._last_step[key] = step
        return new


def check_learning_signal(rows: Sequence[TrainedStepRow]) -> Finding | None:
    """Report consecutive steps that taught nothing; as a note if the tasks are solved."""
    streak = 0
    for row in reversed(rows):
        if not _lacks_learning_signal(row):
            break
        streak += 1
    if streak < NO_SIGNAL_STEPS:
        return None
    last, first = rows[-1], rows[-streak]
    since = f"steps {first['step']} to {last['step']}"
    equal = last.get("groups/zero_variance") or 0.0
    if all(map(_is_mostly_solved, rows[-NO_SIGNAL_STEPS:])):
        return Finding(
            f"the tasks are solved: {since} have {equal:.0%} of groups without advantage, "
            "nearly all of them at the best one",
            "stop here, or train on harder tasks",
            first["step"],
            "note",
        )
    if equal < MAX_ZERO_VARIANCE:
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


def _lacks_learning_signal(row: TrainedStepRow) -> bool:
    norms = [row[name] for name in ("grad_norm", "critic/grad_norm") if name in row]
    lacks_gradient = bool(norms) and all(norm == 0 for norm in norms)
    return lacks_gradient or (row.get("groups/zero_variance") or 0.0) >= MAX_ZERO_VARIANCE


def _is_mostly_solved(row: TrainedStepRow) -> bool:
    equal, best = (row.get(f"groups/{name}") or 0.0 for name in ("zero_variance", "all_best"))
    return bool(equal > 0 and best >= MIN_BEST_SHARE_OF_EQUAL_GROUPS * equal)


def check_reward_drop(rows: Sequence[TrainedStepRow]) -> Finding | None:
    """Report the first fall of the reward from which it has not recovered."""
    rewarded = [row for row in rows if row.get("reward/mean") is not None]
    rewards = [float(row["reward/mean"]) for row in rewarded]
    highest_since, finding = -math.inf, None
    for index in range(len(rewarded) - 1, 0, -1):
        highest_since = max(highest_since, rewards[index])
        before = slice(max(0, index - COMPARED_STEPS_BEFORE), index)
        mean = statistics.fmean(rewards[before])
        if highest_since >= mean:  # the usual case: what follows takes longer
            continue
        # The mean reward varies from step to step, and its groups give it a standard error: the
        # larger of the two counts.
        squares = [(row.get("reward/standard_error") or 0.0) ** 2 for row in rewarded[before]]
        group_error = math.sqrt(statistics.fmean(squares) * (1 + 1 / len(squares)))
        step_deviation = statistics.stdev(rewards[before]) if len(squares) > 1 else 0.0
        compared = rewarded[before.start : index + 1]
        lowest = [row["reward/min"] for row in compared if row.get("reward/min") is not None]
        highest = [row["reward/max"] for row in compared if row.get("reward/max") is not None]
        reward_range = max(highest) - min(lowest) if lowest and highest else 0.0
        bound = mean - max(
            MAX_REWARD_DROP_STD * max(group_error, step_deviation),
            MIN_REWARD_DROP_SHARE_OF_RANGE * reward_range,
        )
        if highest_since < bound:
            since = rewarded[index]["step"]
            finding = Finding(
                f"the reward fell at step {since} from {mean:.3g}, the mean of the "
                f"{index - before.start} steps before, below {bound:.3g}; now it is "
                f"{rewards[-1]:.3g}",
                "lower trainer.optimizer.lr and go back to a checkpoint before that step",
                since,
            )
    return finding


def check_engine_mismatch(rows: Sequence[TrainedStepRow]) -> Finding | None:
    name, bound = "logprob/engine_trainer_mean_abs_diff", MAX_ENGINE_TRAINER_DIFF_NATS
    row = rows[-1]
    if not row.get("logprob/compared_tokens") or name not in row:
        return None
    diff = row[name]
    if diff is not None and diff <= bound:
        return None
    size = "is not finite" if diff is None else f"is {diff:.2g} nats on average, above {bound:g}"
    return Finding(
        f"engine and trainer disagree: the difference of a token's log-probability {size}",
        "compare dtype and model files of both, and SGLang's options; weights that a high "
        "learning rate has blown up also do this",
    )


def check_failing_agents(rows: Sequence[TrainedStepRow]) -> Finding | None:
    row = rows[-1]
    failures, ended_well = row.get("episode/failures") or 0, _estimate_successful_episodes(row)
    if failures < MIN_FAILED_TRIES_IN_STEP:
        return None
    share = failures / (failures + ended_well)
    if share <= MAX_FAILED_SHARE_OF_TRIES:
        return None
    return Finding(
        f"{failures} tries of episodes failed, {ended_well:.0f} ended well: {share:.0%} failed, "
        f"above {MAX_FAILED_SHARE_OF_TRIES:.0%}",
        "areal-hpc why RUN names their errors",
    )


def _estimate_successful_episodes(row: TrainedStepRow) -> float:
    """Estimate the training episodes since the previous row that did not fail.

    Tickets beside the batch are assumed to have as many episodes as those in it. Episodes of a
    ticket include failures that earn a reward; a ticket with no others is dropped as failed.
    """
    rewarded = row.get("episode/rewarded_failures") or 0
    kinds = ("filtered", "stale_dropped", *(("failed",) if rewarded else ()))
    others = sum(row.get(f"tickets/{kind}") or 0 for kind in kinds)
    episodes: float = row["episodes"]
    per_ticket = episodes / row["groups"] if row.get("groups") else 0.0
    return max(0.0, episodes + others * per_ticket - rewarded)


def check_reply_length(rows: Sequence[TrainedStepRow]) -> Finding | None:
    name = "reply/tokens_mean"
    before = [row[name] for row in rows[-COMPARED_STEPS_BEFORE - 1 : -1] if row.get(name)]
    now = rows[-1].get(name)
    if not now or len(before) < MIN_COMPARED_STEPS_BEFORE:
        return None
    ratio = now / statistics.fmean(before)
    if 1 / MAX_REPLY_LENGTH_RATIO <= ratio <= MAX_REPLY_LENGTH_RATIO:
        return None
    message = (
        f"replies have {now:.0f} tokens, {ratio:.2g} times the mean of the {len(before)} steps "
    )
    return Finding(f"{message}before", READ_ROWS_HINT)


def check_unrewarded_replies(rows: Sequence[TrainedStepRow]) -> Finding | None:
    if not (count := rows[-1].get("reply/unrewarded")):
        return None
    return Finding(
        f"{count} replies of this step's episodes are not trained: no reward reaches them",
        "return one number for the episode, reward these replies, or set "
        "rollout.agent.credit=chronological",
    )


def check_entropy(rows: Sequence[TrainedStepRow]) -> Finding | None:
    """Report a low entropy, unless most groups have only the best reward: nothing to explore."""
    entropy = rows[-1].get("entropy/mean")
    is_solved = (rows[-1].get("groups/all_best") or 0.0) >= MIN_SOLVED_GROUPS
    if entropy is None or entropy >= MIN_ENTROPY_NATS or is_solved:
        return None
    return Finding(
        f"the entropy of sampled tokens is {entropy:.2g} nats, below {MIN_ENTROPY_NATS:g}",
        "raise rollout.sampling.temperature or trainer.objective.clip_high",
    )


def check_reward_hacking(rows: Sequence[TrainedStepRow]) -> Finding | None:
    if (found := find_hacking_evidence(rows)) is None:
        return None
    (before, after), evidence = found
    return Finding(
        f"the reward rises from {before:.3g} to {after:.3g}, but "
        + "; ".join(text for text, _ in evidence),
        "areal-hpc why RUN --hacking shows the episodes to read",
        level=None if any(is_strong for _, is_strong in evidence) else "note",
    )


def check_bound(
    metric: str,
    message: str,
    hint: str,
    *,
    most: float = math.inf,
    least: float = -math.inf,
    scale: float = 1.0,
) -> RuleCheck:
    """Return a check that a metric's newest value, times `scale`, is from `least` to `most`."""

    def check(rows: Sequence[TrainedStepRow]) -> Finding | None:
        value = rows[-1].get(metric)
        if value is None or least <= value * scale <= most:
            return None
        bound = least if value * scale < least else most
        return Finding(message.format(value=value * scale, bound=bound), hint)

    return check


RULES: tuple[AlertRule, ...] = (
    AlertRule("no_signal", "failure", check_learning_signal),
    AlertRule("reward_drop", "failure", check_reward_drop),
    AlertRule("engine_mismatch", "failure", check_engine_mismatch),
    AlertRule("failing_agents", "failure", check_failing_agents),
    AlertRule("reward_hacking", "failure", check_reward_hacking),
    AlertRule("low_entropy", "note", check_entropy),
    AlertRule("reply_length", "note", check_reply_length),
    AlertRule(
        "repetition",
        "note",
        check_bound(
            "reply/repeated_fraction",
            "{value:.0%} of the end of replies is repetition, above {bound:.0%}",
            READ_ROWS_HINT,
            most=MAX_REPEATED_FRACTION,
        ),
    ),
    AlertRule(
        "cut_replies",
        "note",
        check_bound(
            "reply/cut_fraction",
            "{value:.0%} of replies reached their limit of tokens, above {bound:.0%}",
            f"{READ_ROWS_HINT}; if they loop, areal-hpc why RUN --collapse, "
            "else raise rollout.sampling.max_new_tokens",
            most=MAX_CUT_FRACTION,
        ),
    ),
    AlertRule("unrewarded_replies", "note", check_unrewarded_replies),
    AlertRule(
        "full_disk",
        "note",
        check_bound(
            "disk/free_bytes",
            "{value:.2g} GiB are free on the storage of the run, below {bound:g} GiB",
            "make room there: a checkpoint that does not fit ends the run",
            least=MIN_FREE_DISK_GIB,
            scale=2.0**-30,
        ),
    ),
    AlertRule(
        "slow_cell",
        "note",
        check_bound(
            "generation/slowest_cell_ratio",
            "the slowest cell generates at {value:.0%} of the fastest one's speed, below "
            "{bound:.0%}",
            "areal-hpc status RUN names its node; exclude it if that lasts",
            least=MIN_CELL_SPEED_RATIO,
        ),
    ),
)
"""All rules; docs/metrics.md explains each."""
