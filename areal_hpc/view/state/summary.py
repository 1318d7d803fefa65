"""Text about runs: progress of one, summary of a finished one, comparison of several."""

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_hpc.errors import ArealError, ShardError, escape_line
from areal_hpc.metrics.alerts import Alert
from areal_hpc.metrics.step_line import (
    compute_trained_tokens_per_s,
    describe_step_times,
    estimate_remaining_s,
    format_evaluation_set_metrics,
    format_metric,
)
from areal_hpc.metrics.step_metrics import (
    BATCH_WAIT_PHASE,
    CELL_IDLE_S_METRIC,
    CELL_WAIT_PHASE,
    select_paced_rows,
)
from areal_hpc.recipe.keys import flatten_keys, flatten_keys_hiding_private_values, rank_section
from areal_hpc.rundir.manifests import read_quarantined_batches
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.rundir.run_inputs import get_recipe_value
from areal_hpc.rundir.telemetry.events import CELL_FOUND_EVENT, NO_CELL_EVENT
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.events import RunPhaseTracker
from areal_hpc.view.formatting import format_duration, format_table
from areal_hpc.view.state.jobs import describe_unrecorded_jobs
from areal_hpc.view.state.run_view import HeldResources, RunView, view_runs

TRAINER_WAIT_METRICS = tuple(f"time/{phase}_s" for phase in (CELL_WAIT_PHASE, BATCH_WAIT_PHASE))


def describe_activity(view: RunView) -> list[str]:
    lines = []
    if view.is_running:
        if launched_at := view.last_launch_at:
            lines.append(f"  started           {format_duration(time.time() - launched_at)} ago")
        phase = RunPhaseTracker.from_events(view.events).describe(view.ledger)
        lines.append(f"  now               {phase or 'the ledger does not answer'}")
        rollout = get_recipe_value(view.recipe, "rollout") or {}
        if rollout.get("adaptive_concurrency") and view.ledger is not None:
            most = rollout.get("max_concurrent_rollouts")
            lines.append(f"  concurrency       {view.ledger.episode_slots} of {most} episodes")
    if (cause := view.agent_failures.newest) is not None:
        lines.append(f"  agent             failed {view.agent_failures.share_text}: {cause.text}")
        lines.append(f"                    try: {cause.suggested_fix}")
    return [escape_line(line) for line in lines]


def format_run_progress(view: RunView) -> list[str]:
    rows, total, now = view.trained_rows, view.total_steps, time.time()
    lines = [f"  step              {view.step}{f' of {total}' if total else ''}"]
    if rows:
        last = rows[-1]
        lines[0] += f", {format_duration(now - view.paths.metrics.stat().st_mtime)} ago"
        if view.is_running and (left_s := estimate_remaining_s(rows, total)):
            lines[0] += f", about {format_duration(left_s)} left"
        lines.append(f"  reward            {format_metric(last['reward/mean'], '.3f')}")
        if (times := view.step_times) is not None:
            speed = compute_trained_tokens_per_s(select_paced_rows(rows))
            lines.append(f"  speed             {speed:.0f} tokens/s; {describe_step_times(times)}")
        if "staleness/mean" in last:
            mean = format_metric(last["staleness/mean"], ".1f")
            lines.append(f"  staleness         {mean} mean, {last.get('staleness/max')} max")
    elif view.sft:
        if not view.is_sft_alone:  # else its step is the run's
            lines.append(f"  SFT               step {view.sft[-1]['step']}")
        lines += _describe_sft(view.sft)
    checkpoint = "none yet"
    if view.checkpoint is not None:
        step, written_at = view.checkpoint
        checkpoint = f"step {step}, {format_duration(now - written_at)} ago"
    lines.append(f"  last checkpoint   {checkpoint}")
    if get_recipe_value(view.recipe, "reward.isolation") == "none":
        lines.append("  isolation         none: programs of the model can do all that you can")
    match get_recipe_value(view.recipe, "rollout.agent.isolation"):
        case "none":
            lines.append("  agent's sandbox   none: its commands can do all that you can")
        case str(isolation):
            lines.append(f"  agent's sandbox   {isolation}")
    if view.held_resources is not None and view.steps:
        idle = describe_idle_time(view.steps, view.held_resources)
        lines += [f"  idle              {text}" for text in idle]
    missing_s = measure_cell_wait_s(view.recent_events, now)
    if missing_s is not None and not view.paths.finished_marker.exists():
        lines.append(f"  idle              no cell has been there for {format_duration(missing_s)}")
    batches = describe_quarantined_batches(view.paths)
    return [*lines, *(f"  quarantined       {batch}" for batch in batches)]


def describe_idle_time(rows: Sequence[Mapping[str, Any]], held: HeldResources) -> list[str]:
    hours = _sum_hours(rows, "time/step_s")
    waited = _sum_hours(rows, *TRAINER_WAIT_METRICS) * held.trainer
    # cells also wait before the first step begins
    idle = min(hours, _sum_hours(rows, CELL_IDLE_S_METRIC) / max(held.cell_count, 1)) * held.cells
    of_trainer, of_cells = (
        f"{hours * number:.2f} {held.unit}-hours" for number in (held.trainer, held.cells)
    )
    return [
        f"trainer waiting for cells {waited:.2f} of {of_trainer}",
        f"cells waiting for the trainer {idle:.2f} of {of_cells}",
    ]


def _sum_hours(rows: Sequence[Mapping[str, Any]], *names: str) -> float:
    values = (row.get(name) for row in rows for name in names)
    return sum(value for value in values if isinstance(value, int | float)) / 3600


def measure_cell_wait_s(events: Sequence[Mapping[str, Any]], now: float) -> float | None:
    """Return the seconds that the trainer has waited for any cell; None if it does not wait."""
    waits = [row for row in events if row.get("event") in (NO_CELL_EVENT, CELL_FOUND_EVENT)]
    if not waits or waits[-1]["event"] == CELL_FOUND_EVENT:
        return None
    return float(now - waits[-1].get("time", now) + waits[-1].get("waited_s", 0.0))


def describe_quarantined_batches(paths: RunPaths) -> list[str]:
    try:
        batches = read_quarantined_batches(paths)
    except ShardError as error:
        return [error.problems[0].message]
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    if not batches:
        return []
    steps = ", ".join(str(step) for step in sorted(batches))
    hint = f"areal-hpc audit {shlex.quote(str(paths.root))} says why"
    return [f"batch{'es' if len(batches) > 1 else ''} {steps}; {hint}"]


def summarize_run(view: RunView, program: str) -> str:
    """Summarize rewards, speed, exactness, and paths of results.

    `program` is the user's command for `areal-hpc`, in shell words.
    """
    paths, trained = view.paths, view.trained_rows
    if view.is_sft_alone and view.sft:
        return _summarize_sft(view, program)
    if not trained:
        return f"nothing trained yet in {paths.root}"
    last = trained[-1]
    shown_as = _shorten_paths(paths)
    root = shown_as.root
    seconds = sum(row.get("time/step_s") or 0.0 for row in trained)
    compared = [row for row in trained if row.get("logprob/compared_tokens")]
    gaps = [row.get("logprob/engine_trainer_max_abs_diff") for row in compared]
    finite = [gap for gap in gaps if gap is not None]
    worst = max(finite) if finite and len(finite) == len(gaps) else None
    oldest = max(row.get("staleness/max") or 0 for row in trained)
    exported = shown_as.export_dir(format_step_dir(last["step"]))
    n_compared = sum(row["logprob/compared_tokens"] for row in compared)
    spanning = sum(row.get("staleness/mixed_version_rows") or 0 for row in trained)
    lines = [
        f"{paths.run_name}: {last['step']} step{'s' * (last['step'] > 1)}",
        f"  training reward   {format_metric(trained[0]['reward/mean'], '.3f')} -> "
        f"{format_metric(last['reward/mean'], '.3f')}",
        *describe_evaluations(view),
        f"  speed             {compute_trained_tokens_per_s(trained):.0f} tokens/s, "
        f"{seconds / len(trained):.1f} s per step",
        f"  engine vs trainer {format_metric(worst, '.1e')} maximum log-probability difference "
        f"over {n_compared} tokens"
        if compared
        else "  engine vs trainer not compared",
        f"  staleness         {format_metric(last.get('staleness/mean'), '.2f')} mean, "
        f"{oldest} max; {spanning} replies contain tokens of two weight versions",
        f"  run directory     {root}",
    ]
    if exported.is_dir():
        lines.append(f"  trained model     {exported}")
    tensorboard = Path(shlex.split(program)[0]).with_name("tensorboard")
    quoted = shlex.quote(str(root))
    lines += [
        "try next:",
        f"  {program} view {quoted}    # curves and conversations in a browser",
        f"  {program} shards show {quoted}    # recorded conversations",
        f"  {program} report {quoted}    # one HTML file to pass on",
        f"  {program} shards verify {quoted}    # every digest checked",
        f"  {shlex.join([str(tensorboard), '--logdir', str(shown_as.tensorboard_dir)])}",
    ]
    return "\n".join(lines)


def _shorten_paths(paths: RunPaths) -> RunPaths:
    """Return paths relative to the working folder if the run lies below it."""
    root, working_dir = paths.root, Path.cwd()
    return RunPaths(root.relative_to(working_dir) if root.is_relative_to(working_dir) else root)


def _describe_sft(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for title, metric in (("SFT loss", "loss"), ("held-out loss", "eval/loss")):
        if values := [format_metric(row[metric], ".4f") for row in rows if metric in row]:
            lines.append(f"  {title:<17} {values[0]} -> {values[-1]}")
    return lines


def _summarize_sft(view: RunView, program: str) -> str:
    shown_as = _shorten_paths(view.paths)
    quoted = shlex.quote(str(shown_as.root))
    lines = [f"{view.paths.run_name}: {view.step} steps of supervised fine-tuning"]
    lines += [*_describe_sft(view.sft), f"  run directory     {shown_as.root}"]
    if shown_as.sft_export.is_dir():
        lines.append(f"  trained model     {shown_as.sft_export}")
    lines.append("try next:")
    if get_recipe_value(view.recipe, "valid_dataset"):
        lines.append(f"  {program} eval {quoted}    # held-out tasks, with rewards")
    lines.append(f"  {program} view {quoted}    # the curve in a browser")
    return "\n".join(lines)


def describe_evaluations(view: RunView) -> list[str]:
    lines = []
    if evaluations := view.evaluations:
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        start, since = (f"{before:.3f} -> ", f"{first} -> ") if first < last else ("", "")
        lines.append(f"  held-out reward   {start}{after:.3f}  (step {since}{last})")
    newest: dict[str, tuple[int, str]] = {}
    for row in view.steps:
        for text in format_evaluation_set_metrics(row):
            newest[" ".join(text.split()[:2])] = (row["step"], text)
    lines += [f"  {'evaluation set':<17} {text}  (step {step})" for step, text in newest.values()]
    return lines


def format_alert(alert: Alert) -> str:
    line = f"{alert.level:<8} {alert.message} ({alert.rule}; try: {alert.hint})"
    return escape_line(line)


RUN_NAME_KEYS = ("experiment_name", "trial_name")
MAX_SHOWN_KEYS = 6
MAX_VALUE_CHARS = 40


def compare_runs(
    runs: Sequence[RunPaths], queue: QueuePoller, *, shows_all_keys: bool = False
) -> list[str]:
    """Return a table of runs, then their jobs in Slurm that no file records.

    The first `MAX_SHOWN_KEYS` recipe keys that differ are columns, or all of them. A run that
    cannot be read is named below the table. Values that may be secrets are compared, and not shown.
    """
    notes, views = [], []
    for view in view_runs(runs, queue):
        try:
            _ = view.recipe, view.steps
            views.append(view)
        except (ArealError, OSError) as error:
            notes.append(f"left out: {view.paths.root}: {error}")
    differing = label_differing_keys([view.recipe for view in views])
    if not shows_all_keys:
        usual_first = sorted(differing, key=lambda item: rank_section(item[0]))
        differing, left_out = usual_first[:MAX_SHOWN_KEYS], usual_first[MAX_SHOWN_KEYS:]
        if left_out:
            notes.append(f"{len(left_out)} more recipe keys differ: --all")
    head = ("run", "state", "step", "reward", "held-out", *(short for _, short in differing))
    rows = [(*_list_cells(view), *_list_values(view, differing)) for view in views]
    for view in views:
        if view.problem:
            notes.append(f"state unreadable: {view.paths.root}: {view.problem}")
        else:
            notes += describe_unrecorded_jobs(view.jobs)
    return [*format_table([head, *rows]), *notes]


def _list_cells(view: RunView) -> tuple[str, ...]:
    last: dict[str, Any] = {}
    for row in view.steps:
        last |= row
    rewards = (
        format_metric(last[name], ".3f") if name in last else "-"
        for name in ("reward/mean", "eval/reward")
    )
    return view.paths.run_name, view.state, f"{view.step}/{view.total_steps or '?'}", *rewards


def _list_values(view: RunView, keys: Sequence[tuple[str, str]]) -> list[str]:
    shown = flatten_keys_hiding_private_values(view.recipe)
    texts = [str(shown.get(key, "-")) for key, _ in keys]
    return [
        text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
        for text in texts
    ]


def label_differing_keys(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the keys whose values differ among resolved recipes, with their shortest clear names.

    Recipes that cannot be read, as another user's, are left out.
    """
    flat = list(filter(None, map(flatten_keys, recipes)))
    keys = sorted(
        key
        for key in {key for recipe in flat for key in recipe}
        if key not in RUN_NAME_KEYS and len({repr(recipe.get(key)) for recipe in flat}) > 1
    )
    lasts = [key.rpartition(".")[2] for key in keys]
    return [
        (key, last if lasts.count(last) == 1 else key)
        for key, last in zip(keys, lasts, strict=True)
    ]
