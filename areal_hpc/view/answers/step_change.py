"""Comparison of one step with the steps before it (`areal-hpc why RUN --step N`)."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress

import msgspec

from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.metrics.step_metrics import find_metric, read_metrics, select_trained_rows
from areal_hpc.recipe.keys import flatten_keys, flatten_keys_hiding_private_values
from areal_hpc.rundir.jsonl import JsonRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import NO_SOURCES, TrainSources, read_run_recipe
from areal_hpc.rundir.telemetry.events import read_all_events
from areal_hpc.view.batch_episodes import BatchEpisode, read_batch_episodes
from areal_hpc.view.events import count_unusual_events
from areal_hpc.view.formatting import (
    Answer,
    Finding,
    build_page_url_fragment,
    format_step_range,
    format_value,
    get_number,
    list_numbers,
)
from areal_hpc.view.state.run_view import RunView
from areal_hpc.wire.decoding import decode_json

MIN_SOURCE_SHARE_CHANGE = 0.2
MIN_REWARD_CHANGE_SHARE_OF_RANGE = 0.1
MAX_SHOWN_TASKS = 3
MAX_STEPS_BEFORE = 10
MIN_STEPS_BEFORE = 2
MIN_DEVIATIONS = 3.0
MIN_RELATIVE_CHANGE = 0.05
MAX_SHOWN_METRICS = 8
MAX_SHOWN_EVENTS = 6
MAX_DISTINCT_SAMPLING_VALUES = 8
ROUTINE_METRICS = frozenset(
    {
        *("step", "generation", "unix_time_s", "lr", "disk/free_bytes"),
        *("memory/trainer_peak_bytes", "tokens/trained", "tokens/sampled"),
        *("logprob/compared_tokens", "reward/mean"),
    }
)
ROUTINE_PREFIXES = ("weights/", "throughput/", "time/")


def explain_step_difference(paths: RunPaths, step: int) -> Answer:
    """Explain what differs at a step from the ten before it, the likeliest causes first."""
    run, rows = paths.run_name, select_trained_rows(read_metrics(paths.metrics))
    row = next((row for row in rows if row["step"] == step), None)
    if row is None:
        known = format_step_range(rows) if rows else "none"
        raise RecipeError(
            f"step {step} is not among the trained ones: {known}", key="--step", hint="choose one"
        )
    before = [row for row in rows if row["step"] < step][-MAX_STEPS_BEFORE:]
    if len(before) < MIN_STEPS_BEFORE:
        raise RecipeError(
            f"step {step} has {len(before)} trained steps before it, at least {MIN_STEPS_BEFORE} "
            "are needed to compare it with",
            key="--step",
            hint="choose a later step",
        )
    problems: list[str] = []
    episodes = read_batch_episodes(paths, [row["step"] for row in (*before, row)], problems)
    now = [episode for episode in episodes if episode.step == step]
    earlier = [episode for episode in episodes if episode.step != step]
    overview = build_page_url_fragment("overview", run)
    task_causes, task_notes = _compare_tasks(paths, now, earlier)
    causes = [
        *(Finding(change, overview) for change in _describe_recipe_changes(paths, before[0], row)),
        *task_causes,
    ]
    if "generation" in row and row["generation"] != before[-1].get("generation"):
        text = f"the trainer was started again before this step (generation {row['generation']})"
        causes.append(Finding(text, overview))
    causes += _describe_new_call_settings(run, step, now, earlier)
    metrics = [
        Finding(text, build_page_url_fragment("metrics", run, text=name))
        for name, text in _list_metric_changes(row, before)[:MAX_SHOWN_METRICS]
    ]
    events = [Finding(text, overview) for text in _describe_events_between(paths, before[-1], row)]
    likeliest = [*causes, *metrics]
    because = likeliest[0].text if likeliest else "nothing else differs either"
    where = f"step={step} and kind=train"
    page = build_page_url_fragment("trajectories", run, where=where, sort="reward", order="up")
    return Answer(
        f"{_describe_reward(row, before)}; {because}",
        (
            *likeliest,
            *task_notes,
            *events,
            *(Finding(f"not read: {problem}") for problem in problems[:3]),
            Finding(f"the episodes of step {step}, the worst first", page),
        ),
    )


def _describe_recipe_changes(paths: RunPaths, first_row: JsonRow, last_row: JsonRow) -> list[str]:
    """Describe recipe keys that launches between two steps changed, without secret values."""
    from_time, to_time = first_row.get("unix_time_s"), last_row.get("unix_time_s")
    if from_time is None or to_time is None:
        return []
    try:
        launches = [
            (attempt, launched_at, read_run_recipe(paths.replaced_recipe(attempt)))
            for attempt, launched_at in RunView(paths).launch_times
            if attempt > 1 and paths.replaced_recipe(attempt).exists()
        ]
        recipes = [*(old for _, _, old in launches), read_run_recipe(paths.recipe)]
    except ArealError as error:
        return [f"recipes of launches: {error}"]
    lines = []
    for (attempt, launched_at, old), new in zip(launches, recipes[1:], strict=True):
        if from_time <= launched_at <= to_time:
            raw_old, raw_new = flatten_keys(old), flatten_keys(new)
            was, now = (flatten_keys_hiding_private_values(recipe) for recipe in (old, new))
            lines += [
                f"launch {attempt} changed {key} from {was.get(key)} to {now.get(key)}"
                for key in sorted(raw_old.keys() | raw_new.keys())
                if raw_old.get(key) != raw_new.get(key)
            ]
    return lines


def _describe_events_between(paths: RunPaths, last_row: JsonRow, row: JsonRow) -> Iterator[str]:
    begin, end = last_row.get("unix_time_s"), row.get("unix_time_s")
    if begin and end:
        events = (row for row in read_all_events(paths.events) if begin <= row["time"] <= end)
        for event, role, count in count_unusual_events(events, MAX_SHOWN_EVENTS):
            yield f"meanwhile: {event}{f' {count} times' if count > 1 else ''} ({role})"


def _describe_reward(row: JsonRow, rows_before: Sequence[JsonRow]) -> str:
    rewards, now = list_numbers(rows_before, "reward/mean"), get_number(row, "reward/mean")
    if now is None or not rewards:
        return f"step {row['step']} has no reward to compare"
    mean = statistics.fmean(rewards)
    deviations = (now - mean) / _compute_std_with_floor(rewards, mean)
    where = "above" if deviations > 0 else "below"
    return (
        f"the reward of step {row['step']} is {now:.3f}, {abs(deviations):.1f} standard deviations "
        f"{where} the {mean:.3f} of {format_step_range(rows_before)}"
    )


def _compute_std_with_floor(values: Sequence[float], mean: float) -> float:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return max(spread, MIN_RELATIVE_CHANGE / MIN_DEVIATIONS * abs(mean), 1e-9)


def _list_metric_changes(row: JsonRow, rows_before: Sequence[JsonRow]) -> list[tuple[str, str]]:
    """List metrics that are far from their earlier values, and how far; the farthest first."""
    changes = []
    for name in row:
        now, values = get_number(row, name), list_numbers(rows_before, name)
        is_routine = name in ROUTINE_METRICS or name.startswith(ROUTINE_PREFIXES)
        if now is None or len(values) < MIN_STEPS_BEFORE or find_metric(name) is None:
            continue
        if is_routine and name != "time/step_s":
            continue
        mean = statistics.fmean(values)
        deviations = abs(now - mean) / _compute_std_with_floor(values, mean)
        if deviations >= MIN_DEVIATIONS:
            verb = "rose" if now > mean else "fell"
            distance = f"{deviations:.1f}" if deviations < 100 else "over 100"
            text = (
                f"{name} {verb} from {format_value(name, mean)} to {format_value(name, now)} "
                f"({distance} standard deviations)"
            )
            changes.append((deviations, name, text))
    return [(name, text) for _, name, text in sorted(changes, reverse=True)]


def _describe_new_call_settings(
    run: str, step: int, now: Iterable[BatchEpisode], earlier_episodes: Iterable[BatchEpisode]
) -> Iterator[Finding]:
    page = build_page_url_fragment("trajectories", run, where=f"step={step}")
    sampling, before = _collect_sampling_values(now), _collect_sampling_values(earlier_episodes)
    for name in sorted(sampling):
        earlier_values = before.get(name, set())
        if len(sampling[name] | earlier_values) > MAX_DISTINCT_SAMPLING_VALUES:
            continue  # differs by request, such as the tokens that remain for the reply
        if before and (new := sampling[name] - earlier_values):
            old = ", ".join(sorted(earlier_values)) or "not given"
            yield Finding(f"calls ask for {name}={', '.join(sorted(new))}, before {old}", page)
    tools, old_tools = (
        {call.tools for episode in episodes for call in episode.record.calls.values()}
        for episodes in (now, earlier_episodes)
    )
    if old_tools and (new_tools := tools - old_tools):
        yield Finding(f"{len(new_tools)} sets of tools are new: their schemas changed", page)


def _collect_sampling_values(episodes: Iterable[BatchEpisode]) -> dict[str, set[str]]:
    values_by_name: dict[str, set[str]] = {}
    for episode in episodes:
        for call in episode.record.calls.values():
            for name, value in call.sampling.items():
                if not name.endswith("seed") and isinstance(value, int | float | str | bool):
                    values_by_name.setdefault(name, set()).add(str(value)[:40])
    return values_by_name


def _compare_tasks(
    paths: RunPaths, now: Sequence[BatchEpisode], earlier_episodes: Sequence[BatchEpisode]
) -> tuple[list[Finding], list[Finding]]:
    """Return causes and notes: sources, new tasks, and tasks with a better reward before.

    A run that never repeats a task has new ones at every step: only a change that the newest of
    the steps before does not show, compared with the others, is a cause.
    """
    now, earlier_episodes = (
        [episode for episode in episodes if episode.task >= 0]
        for episodes in (now, earlier_episodes)
    )
    if not now or not earlier_episodes:
        return [], []
    rewards, before = _average_reward_by_task(now), _average_reward_by_task(earlier_episodes)
    run, sources = paths.run_name, NO_SOURCES
    with suppress(OSError, msgspec.DecodeError):  # absent if there is one source
        sizes = decode_json(paths.train_source_sizes.read_bytes(), list[int])
        sources = TrainSources(sizes=tuple(sizes))
    where = f"step={now[0].step} and kind=train"
    page = build_page_url_fragment("trajectories", run, where=where, sort="task")
    last = max(episode.step for episode in earlier_episodes)
    usual_now = {episode.task for episode in earlier_episodes if episode.step == last}
    usual_before = {episode.task for episode in earlier_episodes if episode.step < last}
    texts = list(_describe_source_share_changes(now, earlier_episodes, sources))
    if not _describe_task_range_shift(usual_now, usual_before):
        texts += filter(None, [_describe_task_range_shift(rewards.keys(), before.keys())])
    causes = [Finding(text, page) for text in texts]
    new_tasks = Finding(_describe_new_tasks(rewards, before), page)
    usual_share = len(usual_now - usual_before) / max(1, len(usual_now))
    share = len(rewards.keys() - before.keys()) / len(rewards)
    is_cause = share - usual_share >= MIN_SOURCE_SHARE_CHANGE and bool(usual_before)
    causes += [new_tasks] if is_cause else []
    causes += _describe_unlearned_tasks(run, now, earlier_episodes)
    return causes, [] if is_cause else [new_tasks]


def _average_reward_by_task(episodes: Iterable[BatchEpisode]) -> dict[int, float]:
    rewards_by_task: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        rewards_by_task[episode.task].append(episode.mean_row_reward)
    return {task: statistics.fmean(rewards) for task, rewards in rewards_by_task.items()}


def _describe_source_share_changes(
    now: Iterable[BatchEpisode], earlier_episodes: Iterable[BatchEpisode], sources: TrainSources
) -> Iterator[str]:
    """Describe changed shares of the training set's sources."""
    shares = []
    for episodes in (now, earlier_episodes):
        counts = Counter(sources.find_index(episode.task) for episode in episodes)
        total = max(1, counts.total())
        shares.append([counts[source] / total for source in range(len(sources.sizes))])
    changes = [
        (share - before, source) for source, (share, before) in enumerate(zip(*shares, strict=True))
    ]
    for change, source in sorted(changes, reverse=True):
        if abs(change) >= MIN_SOURCE_SHARE_CHANGE:
            yield (
                f"source {source} of the training set gives {shares[0][source]:.0%} of the "
                f"episodes, before {shares[1][source]:.0%}"
            )


def _describe_task_range_shift(tasks: Set[int], tasks_before: Set[int]) -> str:
    """Describe a move to another part of the task set; empty if the ranges overlap."""
    if not tasks or not tasks_before:
        return ""
    low, high, old_low, old_high = min(tasks), max(tasks), min(tasks_before), max(tasks_before)
    if low <= old_high and high >= old_low:
        return ""
    lines = f"lines {low} to {high}, before {old_low} to {old_high}"
    return f"its tasks are from another part of the set: {lines}"


def _describe_new_tasks(rewards: Mapping[int, float], rewards_before: Mapping[int, float]) -> str:
    new = [rewards[task] for task in rewards if task not in rewards_before]
    known = [task for task in rewards if task in rewards_before]
    text = f"{len(new)} of {len(rewards)} tasks were not in the steps before"
    if new:
        text += f", their mean reward is {statistics.fmean(new):.3f}"
    if known:
        now, before = (
            statistics.fmean(reward_by_task[task] for task in known)
            for reward_by_task in (rewards, rewards_before)
        )
        text += f"; that of the {len(known)} others is {now:.3f}, it was {before:.3f}"
    return text


def _describe_unlearned_tasks(
    run: str, now: Sequence[BatchEpisode], earlier_episodes: Sequence[BatchEpisode]
) -> Iterator[Finding]:
    row_rewards = [episode.mean_row_reward for episode in (*now, *earlier_episodes)]
    best = max(row_rewards)
    margin = MIN_REWARD_CHANGE_SHARE_OF_RANGE * (best - min(row_rewards))
    rewards, before = _average_reward_by_task(now), _average_reward_by_task(earlier_episodes)
    falls = {
        task: before[task] - rewards[task]
        for task in rewards
        if before.get(task, -math.inf) >= best - margin
    }
    fallen = sorted((task for task in falls if falls[task] > margin), key=lambda task: -falls[task])
    if not fallen:
        return
    yield Finding(f"{len(fallen)} of {len(falls)} tasks that were right before are not now")
    for task in fallen[:MAX_SHOWN_TASKS]:
        episodes = [episode for episode in now if episode.task == task]
        worst = min(episodes, key=lambda episode: episode.mean_row_reward)
        yield Finding(
            f"task {task}: {rewards[task]:.3f}, before {before[task]:.3f}; "
            f"{worst.title} has {worst.mean_row_reward:g}",
            build_page_url_fragment("trajectory", run, row=worst.first_row_name),
        )
