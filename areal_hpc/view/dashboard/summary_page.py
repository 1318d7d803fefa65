"""What the page Summary of a run shows: its accounts, what it cost, answers, and its launches."""

import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from areal_hpc.errors import ArealError
from areal_hpc.metrics.step_line import compute_trained_tokens_per_s
from areal_hpc.metrics.step_metrics import find_step_bottleneck, select_trained_rows
from areal_hpc.recipe.private_values import hide_private_arguments
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import read_all_events
from areal_hpc.view.answers.answer import Answer
from areal_hpc.view.answers.collapse import diagnose_collapse
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.audit import audit_run
from areal_hpc.view.events.failures import count_unusual_events
from areal_hpc.view.metric_values import (
    format_value,
    list_numbers,
    list_restart_steps,
)
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.tables import format_duration

MAX_SHOWN_EVENTS = 12

JsonObject = dict[str, Any]


def describe_summary(view: RunView) -> JsonObject:
    paths = view.paths
    return {
        "facts": list(_list_facts(view)),
        "audit": list(_describe_audit(paths)),
        "answers": [
            describe_answer(answer)
            for answer in (explain_slow_run(paths), diagnose_collapse(paths))
        ],
        "events": count_unusual_events(read_all_events(paths.events), MAX_SHOWN_EVENTS),
        "launches": [list(_describe_launch(one)) for one in view.launches],
    }


def describe_answer(answer: Answer) -> JsonObject:
    findings = [{"text": one.text, "page": one.page} for one in answer.findings]
    return {"headline": answer.headline, "findings": findings, "hints": answer.hints}


def _describe_audit(paths: RunPaths) -> Iterator[str]:
    try:
        audit = audit_run(paths)
    except (ArealError, OSError) as error:
        yield f"not audited: {error}"
        return
    yield audit.summary_line
    yield from (f"problem: {one}" for one in audit.problems[:5])
    if audit.untrained:
        count = len(audit.untrained)
        yield f"{count} parts of batches were not trained: areal-hpc audit lists them"


def _list_facts(view: RunView) -> Iterator[tuple[str, str]]:
    rows = select_trained_rows(view.steps)
    launches, ends = view.launch_times, list_numbers(rows, "unix_time_s")
    steps_s = sum(list_numbers(rows, "time/step_s"))
    if launches and ends:
        wall_s = ends[-1] - launches[0][1]
        yield "wall time", f"{format_duration(wall_s)} from the first launch to the last step"
    if steps_s:
        yield "time of steps", format_duration(steps_s)
    limits = Counter(limit for row in rows if (limit := find_step_bottleneck(row)) is not None)
    if limits:
        told = ", ".join(f"{count} by {limit}" for limit, count in limits.most_common())
        yield "steps limited", told
    yield "restarts of the trainer survived", str(len(list_restart_steps(rows)))
    if (tokens := sum(list_numbers(rows, "tokens/trained"))) and steps_s:
        speed = compute_trained_tokens_per_s(rows)
        yield "tokens trained", f"{tokens:,.0f}, {speed:.0f} a second over all phases"
    if mfu := list_numbers(rows, "throughput/mfu"):
        yield "model FLOP/s utilization", f"{statistics.fmean(mfu):.1%} while training"
    for metric, title, choose in (
        ("memory/trainer_peak_bytes", "most memory of a rank", max),
        ("disk/free_bytes", "least room on the storage", min),
    ):
        if values := list_numbers(rows, metric):
            yield title, format_value(metric, choose(values))
    yield "failed tries of episodes", f"{sum(list_numbers(rows, 'episode/failures')):.0f}"


def _describe_launch(launch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("attempt", "time", "host"):
        yield name, str(launch.get(name))
    command = [*map(str, launch.get("command") or ())]
    yield "command", shlex.join(hide_private_arguments(command))
    commit = launch.get("git_commit") or "not known"
    yield "areal_hpc", f"{launch.get('areal_hpc')} (commit {commit})"
    yield "GPU driver", str(launch.get("gpu_driver") or "none")
    user = (launch.get("repositories") or {}).get("user") or {}
    yield "code", str(user.get("revision") or "not recorded")
    for name, environment in (launch.get("environments") or {}).items():
        if isinstance(environment, dict):
            packages = (environment.get("packages") or {}).items()
            told = [f"Python {environment.get('python')}", *(f"{one} {at}" for one, at in packages)]
            yield f"{name} environment", ", ".join(told)
