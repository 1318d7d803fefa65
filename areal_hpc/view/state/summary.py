"""Progress of a run, and the summary of a finished one on one screen."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.errors import ShardError, escape_line
from areal_hpc.metrics.step_line import (
    compute_trained_tokens_per_s,
    estimate_remaining_s,
    format_evaluation_set_metrics,
    format_metric,
)
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.rundir.quarantine import read_quarantined_batches
from areal_hpc.rundir.run_recipe import get_recipe_value, read_run_recipe
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.view.events.agent_failures import AgentFailures
from areal_hpc.view.events.run_phase import RunPhaseTracker
from areal_hpc.view.state.run_state import (
    RunSnapshot,
    read_events_since_launch,
    read_last_launch_time,
    read_run_snapshot,
)
from areal_hpc.view.tables import format_duration
from areal_hpc.view.timing.idle_time import (
    describe_idle_time,
    measure_wait_without_cells_s,
    read_held_resources,
)


@dataclass(frozen=True, slots=True)
class RunProgress:
    recipe: dict[str, Any]
    snapshot: RunSnapshot
    checkpoint_step: int | None
    checkpoint_s_ago: float
    metrics_s_ago: float
    """Since the last step was noted; 0 before the first."""

    @property
    def total_steps(self) -> int:
        return int(self.recipe["trainer"].get("total_steps") or 0)

    @property
    def cell_count(self) -> int:
        return int(get_recipe_value(self.recipe, "inference.cells") or 1)

    @property
    def isolates_model_programs(self) -> bool:
        return str(get_recipe_value(self.recipe, "reward.isolation")) != "none"

    @property
    def agent_isolation(self) -> str:
        return str(get_recipe_value(self.recipe, "rollout.agent.isolation") or "")

    @property
    def step(self) -> int:
        return int(self.snapshot.steps[-1]["step"]) if self.snapshot.steps else 0


def read_run_progress(paths: RunPaths) -> RunProgress:
    found = list_checkpoints(paths.checkpoints_dir, problems=[])  # audit tells of damaged ones
    checkpoint = found[-1] if found else None
    now = time.time()
    return RunProgress(
        recipe=read_run_recipe(paths.recipe),
        snapshot=read_run_snapshot(paths),
        checkpoint_step=checkpoint.state.step if checkpoint else None,
        checkpoint_s_ago=now - checkpoint.written_at if checkpoint else 0.0,
        metrics_s_ago=now - paths.metrics.stat().st_mtime if paths.metrics.exists() else 0.0,
    )


def describe_activity(paths: RunPaths, *, is_running: bool) -> list[str]:
    events = read_events_since_launch(paths)
    lines = []
    if is_running:
        if launched_at := read_last_launch_time(paths):
            lines.append(f"  started           {format_duration(time.time() - launched_at)} ago")
        snapshot = read_run_snapshot(paths, ask_ledger=True)
        phase = RunPhaseTracker.from_events(events).describe(snapshot.ledger)
        lines.append(f"  now               {phase or 'the ledger does not answer'}")
    failures = AgentFailures.collect(events)
    if (cause := failures.newest) is not None:
        lines.append(f"  agent             failed {failures.share_text}: {cause.text}")
        lines.append(f"                    try: {cause.suggested_fix}")
    return [escape_line(line) for line in lines]


def format_run_progress(
    progress: RunProgress, paths: RunPaths, *, is_running: bool = False
) -> list[str]:
    rows = [row for row in progress.snapshot.steps if "reward/mean" in row]
    asked = f" of {progress.total_steps}" if progress.total_steps else ""
    lines = [f"  step              {progress.step}{asked}"]
    if rows:
        last = rows[-1]
        lines[0] += f", {format_duration(progress.metrics_s_ago)} ago"
        if is_running and (left_s := estimate_remaining_s(rows, progress.total_steps)):
            lines[0] += f", about {format_duration(left_s)} left"
        lines += [
            f"  reward            {format_metric(last['reward/mean'], '.3f')}",
            f"  speed             {compute_trained_tokens_per_s([last]):.0f} tokens/s, "
            f"{format_metric(last.get('time/step_s'), '.1f')} s for the step",
        ]
        if "staleness/mean" in last:
            mean = format_metric(last["staleness/mean"], ".1f")
            lines.append(f"  staleness         {mean} mean, {last.get('staleness/max')} max")
    elif progress.snapshot.sft:
        lines.append(f"  SFT               step {progress.snapshot.sft[-1]['step']}")
    if progress.checkpoint_step is None:
        lines.append("  last checkpoint   none yet")
    else:
        lines.append(
            f"  last checkpoint   step {progress.checkpoint_step}, "
            f"{format_duration(progress.checkpoint_s_ago)} ago"
        )
    if not progress.isolates_model_programs:
        lines.append("  isolation         none: programs of the model can do all that you can")
    if progress.agent_isolation == "none":
        lines.append("  agent's sandbox   none: its commands can do all that you can")
    elif progress.agent_isolation:
        lines.append(f"  agent's sandbox   {progress.agent_isolation}")
    size = read_held_resources(paths, progress.cell_count)
    if size is not None and progress.snapshot.steps:
        idle = describe_idle_time(progress.snapshot.steps, size)
        lines += [f"  idle              {one}" for one in idle]
    missing_s = measure_wait_without_cells_s(read_recent_events(paths.events), time.time())
    if missing_s is not None and not paths.finished_marker.exists():
        lines.append(f"  idle              no cell has been there for {format_duration(missing_s)}")
    return [*lines, *(f"  quarantined       {one}" for one in describe_quarantined_batches(paths))]


def describe_quarantined_batches(paths: RunPaths) -> list[str]:
    try:
        held = read_quarantined_batches(paths)
    except ShardError as error:
        return [error.problems[0].message]
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    if not held:
        return []
    steps = ", ".join(str(step) for step in sorted(held))
    hint = f"areal-hpc audit {shlex.quote(str(paths.root))} says why"
    return [f"batch{'es' if len(held) > 1 else ''} {steps}; {hint}"]


def summarize_run(paths: RunPaths, snapshot: RunSnapshot, program: str) -> str:
    """Start and end reward, speed, exactness, and where everything lies.

    `program` is how the reader calls this command line, in shell words.
    """
    trained = [row for row in snapshot.steps if "reward/mean" in row]
    if not trained:
        return f"nothing trained yet in {paths.root}"
    last = trained[-1]
    root, here = paths.root, Path.cwd()
    if root.is_relative_to(here):
        root = root.relative_to(here)
    shown_as = RunPaths(root)
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
        f"{paths.run_name}: {last['step']} steps",
        f"  training reward   {format_metric(trained[0]['reward/mean'], '.3f')} -> "
        f"{format_metric(last['reward/mean'], '.3f')}",
    ]
    lines += [
        *describe_evaluations(snapshot),
        f"  speed             {compute_trained_tokens_per_s(trained):.0f} tokens/s, "
        f"{seconds / len(trained):.1f} s per step",
        f"  engine vs trainer {format_metric(worst, '.1e')} maximum log-probability difference "
        f"over {n_compared} tokens"
        if compared
        else "  engine vs trainer not compared",
        f"  staleness         {format_metric(last.get('staleness/mean'), '.2f')} mean, "
        f"{oldest} max; "
        f"{spanning} replies contain tokens of two weight versions",
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


def describe_evaluations(snapshot: RunSnapshot) -> list[str]:
    lines = []
    if evaluations := snapshot.evaluations:
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        lines.append(f"  held-out reward   {before:.3f} -> {after:.3f}  (step {first} -> {last})")
    newest: dict[str, tuple[int, str]] = {}
    for row in snapshot.steps:
        for text in format_evaluation_set_metrics(row):
            newest[" ".join(text.split()[:2])] = (row["step"], text)
    lines += [f"  {'evaluation set':<17} {text}  (step {step})" for step, text in newest.values()]
    return lines
