"""What happened to a run in a span of time: changed recipes, and events that are not routine."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from areal_hpc.recipe.loading import flatten_keys, flatten_keys_hiding_private_values
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import read_run_recipe

ROUTINE_EVENTS = frozenset(
    {
        "episodes_counted",
        "job_submitted",
        "launcher_ended",
        "ranks_joined",
        "replica_resumed",
        "state_loaded",
        "weights_published",
    }
)
MAX_SHOWN_EVENTS = 6


def describe_unusual_events(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    counts = Counter(
        (str(one.get("event")), str(one.get("role")))
        for one in events
        if one.get("event") not in ROUTINE_EVENTS
    )
    for (event, role), count in counts.most_common(MAX_SHOWN_EVENTS):
        times = f" {count} times" if count > 1 else ""
        yield f"meanwhile: {event}{times} ({role})"


def describe_recipe_changes(
    paths: RunPaths, recipe: Mapping[str, Any], from_time: float, to_time: float
) -> Iterator[str]:
    launches = [(attempt, at) for attempt, at in list_launch_times(paths) if attempt > 1]
    changed = [(attempt, at) for attempt, at in launches if paths.replaced_recipe(attempt).exists()]
    recipes = [read_run_recipe(paths.replaced_recipe(attempt)) for attempt, _ in changed]
    for (attempt, at), old, new in zip(changed, recipes, [*recipes, recipe][1:], strict=True):
        if from_time <= at <= to_time:
            for key, was, now in list_recipe_changes_hiding_secrets(old, new):
                yield f"launch {attempt} changed {key} from {was} to {now}"


def list_recipe_changes_hiding_secrets(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """The keys whose values differ, with both values; those that may be secrets are not shown."""
    before, after = flatten_keys_hiding_private_values(old), flatten_keys_hiding_private_values(new)
    raw_before, raw_after = flatten_keys(old), flatten_keys(new)
    for key in sorted(before.keys() | after.keys()):
        if raw_before.get(key) != raw_after.get(key):
            yield key, before.get(key), after.get(key)


def list_launch_times(paths: RunPaths) -> list[tuple[int, float]]:
    """Attempts of a run with the Unix times of their launches, oldest first."""
    try:
        launches = msgspec.json.decode(paths.provenance.read_bytes())["launches"]
        return [
            (int(one["attempt"]), datetime.fromisoformat(one["time"]).timestamp())
            for one in launches
        ]
    except (OSError, ValueError, LookupError, TypeError, msgspec.DecodeError):
        return []
