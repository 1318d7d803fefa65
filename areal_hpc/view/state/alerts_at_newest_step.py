"""Health of a run: its alerts as of its newest step, from its directory alone."""

from collections.abc import Sequence
from typing import Any

from areal_hpc.errors import RecipeError, escape_line
from areal_hpc.metrics.alerts import (
    MAX_FAILED_SHARE_OF_TRIES,
    MIN_FAILED_TRIES_IN_STEP,
    Alert,
    find_alerts,
)
from areal_hpc.metrics.step_metrics import is_failed_training_try, read_metrics
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import get_recipe_value, read_run_recipe
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.view.state.run_state import read_last_launch_time


def find_run_alerts(paths: RunPaths) -> list[Alert]:
    """What the run's metrics say of it by the rules of its recipe, failures first.

    Before its first trained step, which agents that only fail never let it reach, its events do.
    """
    off, rows = read_alerts_off(paths), read_metrics(paths.metrics)
    if any(row.get("episodes") for row in rows) or "failing_agents" in off:
        return find_alerts(rows, off)
    since = read_last_launch_time(paths)
    events = [event for event in read_recent_events(paths.events) if event.get("time", 0) >= since]
    failing = find_alert_before_first_step(events)
    return [failing] if failing else []


def find_alert_before_first_step(events: Sequence[dict[str, Any]]) -> Alert | None:
    failures = [event for event in events if is_failed_training_try(event)]
    if len(failures) < MIN_FAILED_TRIES_IN_STEP:
        return None
    ended_well = _count_good_ends_since_first_failure(events)
    if len(failures) / (len(failures) + ended_well) <= MAX_FAILED_SHARE_OF_TRIES:
        return None
    newest = failures[-1]
    reason = str(newest.get("message") or newest.get("reason", "")).strip().splitlines()
    last = f"; the last: {reason[-1][:300]}" if reason else ""
    return Alert(
        "failing_agents",
        "failure",
        0,
        f"{len(failures)} tries of episodes failed, and no step has been trained{last}",
        "areal-hpc why RUN names their errors",
    )


def _count_good_ends_since_first_failure(events: Sequence[dict[str, Any]]) -> int:
    """Episodes that ended well since a driver's first failed try, by the counts that it tells.

    Held-out episodes before it say nothing of the tasks that are trained on.
    """
    first: dict[str, int] = {}
    newest: dict[str, int] = {}
    for event in events:
        role, failed, ended = event["role"], event.get("failed"), event.get("ended")
        if not (isinstance(failed, int) and isinstance(ended, int)):
            continue
        if role in first or is_failed_training_try(event):
            first.setdefault(role, ended - failed)
            newest[role] = max(newest.get(role, 0), ended - failed)
    return sum(newest[role] - first[role] for role in first)


def read_alerts_off(paths: RunPaths) -> list[str]:
    """The rules that a run's recipe switches off; none where it cannot be read."""
    try:
        off = get_recipe_value(read_run_recipe(paths.recipe), "alerts.off")
    except RecipeError:
        return []
    return off if isinstance(off, list) else []


def select_failure_alerts(alerts: Sequence[Alert]) -> list[Alert]:
    return [alert for alert in alerts if alert.level == "failure"]


def format_alert(alert: Alert) -> str:
    line = f"{alert.level:<8} {alert.message} ({alert.rule}; try: {alert.hint})"
    return escape_line(line)
