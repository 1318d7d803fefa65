"""What the time of a run's steps goes to, and who is to blame (`areal-hpc why RUN --slow`)."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from areal_hpc.errors import ShardError
from areal_hpc.metrics.step_metrics import read_metrics, select_paced_rows
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import read_run_recipe
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.view.answers.answer import Answer, Finding, build_page_url_fragment
from areal_hpc.view.answers.step_parts import StepPart, list_mean_step_parts, sum_batch_wait_splits
from areal_hpc.view.answers.time_judge import SlowRunEvidence, TimeJudge
from areal_hpc.view.batch_episodes import (
    BatchEpisode,
    list_times_between_calls,
    read_batch_episodes,
    read_first_row_of_each_episode,
)
from areal_hpc.view.logs import list_log_files
from areal_hpc.view.metric_values import format_step_range, list_numbers
from areal_hpc.view.tables import format_table

MAX_READ_STEPS = 10
MAX_READ_ROWS = 400
MIN_SHOWN_SHARE = 0.05
MIN_HINT_SHARE = 0.2
MAX_HINTS = 2
STORAGE_PARTS = ("sealing", "checkpoints", "reading batches", "small files")


def explain_slow_run(paths: RunPaths) -> Answer:
    rows = select_paced_rows(read_metrics(paths.metrics))
    if not rows:
        return Answer("no step with its times is recorded yet")
    problems: list[str] = []
    steps = [row["step"] for row in rows[-MAX_READ_STEPS:]]
    episodes = read_batch_episodes(paths, steps, problems)
    evidence = SlowRunEvidence(
        paths.run_name,
        read_run_recipe(paths.recipe),
        rows,
        episodes,
        _read_times_between_calls(paths, episodes, problems),
        read_recent_events(paths.events),
        _map_cell_to_node(paths),
        problems,
    )
    return _judge_slow_run(evidence)


def _read_times_between_calls(
    paths: RunPaths, episodes: Sequence[BatchEpisode], problems: list[str]
) -> list[tuple[str, float]]:
    several = [one for one in episodes if len(one.record.calls) > 1][-MAX_READ_ROWS:]
    try:
        rows = read_first_row_of_each_episode(paths, several)
    except ShardError as error:
        problems.append(str(error))
        return []
    return [pause for row in rows for pause in list_times_between_calls(row)]


def _map_cell_to_node(paths: RunPaths) -> dict[str, str]:
    try:
        attempts = paths.list_attempts()
        files = list_log_files(paths, attempts[-1]) if attempts else []
    except OSError:
        return {}
    return {file.job_or_cell: file.node for file in files if file.node}


def _judge_slow_run(evidence: SlowRunEvidence) -> Answer:
    rows = evidence.rows
    step_s = statistics.fmean(list_numbers(rows, "time/step_s"))
    split = sum_batch_wait_splits(rows, evidence.episodes)
    parts = list_mean_step_parts(rows, split)
    judge = TimeJudge(evidence, split, step_s)
    shown = [part for part in parts if part.seconds >= MIN_SHOWN_SHARE * step_s]
    verdicts = [judge.explain_part(part) for part in shown]
    cause = verdicts[0].cause if verdicts else ""
    shares = ", ".join(
        f"{part.seconds / step_s:.0%} {part.name}"
        for part in parts
        if part.seconds >= 0.01 * step_s
    )
    findings = [
        Finding(shares, build_page_url_fragment("metrics", evidence.run, text="time/")),
        *(Finding(one.text, one.page) for one in verdicts),
        *_describe_storage(parts, step_s),
        *judge.describe_outliers(cause),
        *(Finding(f"not read: {one}") for one in evidence.problems[:3]),
    ]
    headline = (
        f"the run is limited by {parts[0].name}: {parts[0].seconds:.1f} s of the {step_s:.1f} s of "
        f"a step ({format_step_range(rows)})"
    )
    hints = [
        verdict.hint
        for part, verdict in zip(shown, verdicts, strict=True)
        if verdict.hint and part.seconds >= MIN_HINT_SHARE * step_s
    ]
    return Answer(
        f"{headline}; {cause}" if cause else headline,
        tuple(findings),
        tuple(hints[:MAX_HINTS]),
        tuple(_format_replica_table(evidence, judge)),
    )


def _describe_storage(step_parts: Sequence[StepPart], step_s: float) -> Iterator[Finding]:
    waiting = [part for part in step_parts if part.name in STORAGE_PARTS]
    seconds = sum(part.seconds for part in waiting)
    if len(waiting) > 1 and seconds >= MIN_HINT_SHARE * step_s:
        names = ", ".join(part.name for part in waiting)
        yield Finding(
            f"{names} wait for the run directory's storage: together {seconds:.2f} s a step "
            f"({seconds / step_s:.0%})"
        )


def _format_replica_table(evidence: SlowRunEvidence, judge: TimeJudge) -> list[str]:
    """Every replica, if there are several."""
    starts = Counter(
        (str(row.get("role")), row.get("replica"))
        for row in evidence.events
        if row.get("event") == "replica_started"
    )
    keys = sorted(judge.call_speeds.keys() | judge.update_times.keys())
    if len(keys) < 2:
        return []
    head = ("cell", "replica", "node", "tokens/s in a call", "s at an update", "starts")
    lines = [
        (
            cell,
            str(replica),
            evidence.node_by_cell.get(cell, "-"),
            _format_number(judge.call_speeds.get((cell, replica)), ".0f"),
            _format_number(judge.update_times.get((cell, replica)), ".2f"),
            str(starts[cell, replica] or "-"),
        )
        for cell, replica in keys
    ]
    return format_table([head, *lines], right_aligned_columns=(1, 3, 4, 5))


def _format_number(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)
