"""Which tasks a step trained, against those of the steps before."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import msgspec

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.answers.answer import Finding, build_page_url_fragment
from areal_hpc.view.batch_episodes import BatchEpisode

MIN_SOURCE_SHARE_CHANGE = 0.2
MIN_REWARD_CHANGE_SHARE_OF_RANGE = 0.1
MAX_SHOWN_TASKS = 3


def read_source_row_counts(paths: RunPaths) -> list[int]:
    """Rows of each source of the training set; empty where there is one, or it is not known."""
    try:
        return msgspec.json.decode(paths.train_source_sizes.read_bytes(), type=list[int])
    except (OSError, msgspec.DecodeError):
        return []


@dataclass(frozen=True, slots=True)
class TaskFindings:
    causes: tuple[Finding, ...] = ()
    """What the steps before did not have."""
    notes: tuple[Finding, ...] = ()


def compare_tasks(
    run: str,
    now: Sequence[BatchEpisode],
    earlier_episodes: Sequence[BatchEpisode],
    source_sizes: Sequence[int],
) -> TaskFindings:
    """Sources, new tasks, and tasks that went better before. Pure.

    A run that never comes back to a task has new ones at every step: only what the newest of the
    steps before did not show, compared with the others, is a cause. `source_sizes` are
    the rows of each source.
    """
    rewards, before = _group_rewards_by_task(now), _group_rewards_by_task(earlier_episodes)
    if not rewards or not before:
        return TaskFindings()
    where = f"step={now[0].step} and kind=train"
    page = build_page_url_fragment("trajectories", run, where=where, sort="task")
    last = max(one.step for one in earlier_episodes)
    usual_now = _group_rewards_by_task(one for one in earlier_episodes if one.step == last)
    usual_before = _group_rewards_by_task(one for one in earlier_episodes if one.step < last)
    told = list(_describe_source_share_changes(now, earlier_episodes, source_sizes))
    if not _describe_task_range_shift(usual_now, usual_before):
        told += filter(None, [_describe_task_range_shift(rewards, before)])
    causes = [Finding(one, page) for one in told]
    news = Finding(_describe_new_tasks(rewards, before), page)
    usual = _compute_new_task_share(usual_now, usual_before)
    is_new = _compute_new_task_share(rewards, before) - usual
    is_cause = is_new >= MIN_SOURCE_SHARE_CHANGE and bool(usual_before)
    causes += [news] if is_cause else []
    causes += _describe_no_longer_solved_tasks(run, now, rewards, before)
    return TaskFindings(tuple(causes), () if is_cause else (news,))


def _compute_new_task_share(
    rewards: Mapping[int, object], tasks_before: Mapping[int, object]
) -> float:
    return sum(task not in tasks_before for task in rewards) / max(1, len(rewards))


def _group_rewards_by_task(episodes: Iterable[BatchEpisode]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for one in episodes:
        if one.task >= 0:
            found[one.task].append(one.mean_row_reward)
    return found


def _describe_source_share_changes(
    now: Iterable[BatchEpisode],
    earlier_episodes: Iterable[BatchEpisode],
    source_sizes: Sequence[int],
) -> Iterator[str]:
    if len(source_sizes) < 2:
        return
    shares = _compute_source_shares(now, source_sizes)
    before = _compute_source_shares(earlier_episodes, source_sizes)
    for source in sorted(shares, key=lambda one: before[one] - shares[one]):
        if abs(shares[source] - before[source]) >= MIN_SOURCE_SHARE_CHANGE:
            yield (
                f"source {source} of the training set gives {shares[source]:.0%} of the episodes, "
                f"before {before[source]:.0%}"
            )


def _compute_source_shares(
    episodes: Iterable[BatchEpisode], source_sizes: Sequence[int]
) -> dict[int, float]:
    """The share of episodes by source: tasks of a source follow one another in the set."""
    ends = list(accumulate(source_sizes))
    counts = Counter(
        next((place for place, end in enumerate(ends) if one.task < end), -1)
        for one in episodes
        if one.task >= 0
    )
    total = max(1, counts.total())
    return {source: counts[source] / total for source in range(len(source_sizes))}


def _describe_task_range_shift(
    rewards: Mapping[int, object], tasks_before: Mapping[int, object]
) -> str:
    """Empty where the tasks are of the same part of the set."""
    if not rewards or not tasks_before:
        return ""
    low, high, old_low, old_high = min(rewards), max(rewards), min(tasks_before), max(tasks_before)
    if low <= old_high and high >= old_low:
        return ""
    lines = f"lines {low} to {high}, before {old_low} to {old_high}"
    return f"its tasks are from another part of the set: {lines}"


def _describe_new_tasks(
    rewards: Mapping[int, list[float]], rewards_before: Mapping[int, list[float]]
) -> str:
    new = [task for task in rewards if task not in rewards_before]
    known = [task for task in rewards if task in rewards_before]
    text = f"{len(new)} of {len(rewards)} tasks were not in the steps before"
    if new:
        text += f", their mean reward is {_compute_mean(rewards, new):.3f}"
    if known:
        text += (
            f"; that of the {len(known)} others is {_compute_mean(rewards, known):.3f}, "
            f"it was {_compute_mean(rewards_before, known):.3f}"
        )
    return text


def _compute_mean(rewards: Mapping[int, Sequence[float]], tasks: Sequence[int]) -> float:
    return statistics.fmean(statistics.fmean(rewards[task]) for task in tasks)


def _describe_no_longer_solved_tasks(
    run: str,
    now: Sequence[BatchEpisode],
    rewards: Mapping[int, list[float]],
    rewards_before: Mapping[int, list[float]],
) -> Iterator[Finding]:
    everything = [*chain.from_iterable((*rewards.values(), *rewards_before.values()))]
    best = max(everything)
    least = MIN_REWARD_CHANGE_SHARE_OF_RANGE * (best - min(everything))
    now_mean, mean_before = (
        {task: statistics.fmean(group) for task, group in groups.items()}
        for groups in (rewards, rewards_before)
    )
    falls = {
        task: mean_before[task] - now_mean[task]
        for task in rewards
        if mean_before.get(task, -math.inf) >= best - least
    }
    fallen = sorted((task for task in falls if falls[task] > least), key=lambda task: -falls[task])
    if not fallen:
        return
    yield Finding(f"{len(fallen)} of {len(falls)} tasks that were right before are not now")
    for task in fallen[:MAX_SHOWN_TASKS]:
        worst = min((one for one in now if one.task == task), key=lambda one: one.mean_row_reward)
        yield Finding(
            f"task {task}: {now_mean[task]:.3f}, before {mean_before[task]:.3f}; "
            f"{worst.title} has {worst.mean_row_reward:g}",
            build_page_url_fragment("trajectory", run, row=worst.first_row_name),
        )
