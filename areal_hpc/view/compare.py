"""Comparison of runs."""

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.errors import ArealError, ClusterError
from areal_hpc.metrics.step_line import format_metric
from areal_hpc.recipe.keys import flatten_keys, flatten_keys_hiding_private_values, rank_section
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller, QueueSnapshot, SlurmJobRecord, query_squeue_of_user
from areal_hpc.slurm.run_jobs import list_recorded_job_ids, list_unrecorded_live_jobs
from areal_hpc.view.state.jobs import (
    build_run_jobs,
    describe_unrecorded_jobs,
    get_run_state,
)
from areal_hpc.view.state.summary import RunProgress, read_run_progress
from areal_hpc.view.tables import format_table

RUN_NAME_KEYS = ("experiment_name", "trial_name")
MAX_SHOWN_KEYS = 6
MAX_VALUE_CHARS = 40
MIN_QUERY_INTERVAL_S = 15.0


def compare_runs(
    runs: Sequence[RunPaths], queue: QueuePoller, *, shows_all_keys: bool = False
) -> list[str]:
    """A table of runs, then their jobs that Slurm has and nobody recorded.

    The first `MAX_SHOWN_KEYS` recipe keys that differ are columns, or all of them.

    Slurm is asked about all runs at once: of the jobs on record of those that are not finished, and
    of all jobs of their owners. A run that cannot be read is named below the table. Values that
    may be secrets are compared, and not shown.
    """
    notes, progress_by_run = [], {}
    for paths in runs:
        try:
            progress_by_run[paths] = read_run_progress(paths)
        except (ArealError, OSError) as error:
            notes.append(f"left out: {paths.root}: {error}")
    all_progress = list(progress_by_run.values())
    states = fetch_states_of_runs(list(progress_by_run), queue)
    differing = label_differing_keys([one.recipe for one in all_progress])
    if not shows_all_keys:
        usual_first = sorted(differing, key=lambda one: rank_section(one[0]))
        differing, left_out = usual_first[:MAX_SHOWN_KEYS], usual_first[MAX_SHOWN_KEYS:]
        if left_out:
            notes.append(f"{len(left_out)} more recipe keys differ: --all")
    head = ("run", "state", "step", "reward", "held-out", *(short for _, short in differing))
    rows = [
        (
            paths.run_name,
            state.run_state,
            f"{progress.step}/{progress.total_steps or '?'}",
            _format_last_value(progress, "reward/mean"),
            _format_last_value(progress, "eval/reward"),
            *(
                _shorten(flatten_keys_hiding_private_values(progress.recipe).get(key, "-"))
                for key, _ in differing
            ),
        )
        for (paths, progress), state in zip(progress_by_run.items(), states, strict=True)
    ]
    notes += [note for state in states for note in state.notes]
    return [*format_table([head, *rows]), *notes]


@dataclass(frozen=True, slots=True)
class ListedRunState:
    run_state: str
    notes: tuple[str, ...] = ()


def fetch_states_of_runs(runs: Sequence[RunPaths], queue: QueuePoller) -> list[ListedRunState]:
    """The state of each run; Slurm is asked once for all."""
    ids = [job_id for paths in runs for job_id in _list_job_ids_of_unfinished_run(paths)]
    snapshot = queue.poll_for_display(ids)
    queued: list[SlurmJobRecord] = []
    if not snapshot.outage:
        owners = {paths.root.stat().st_uid for paths in runs if paths.root.exists()}
        with contextlib.suppress(ClusterError):  # silent, or commands without a cluster
            queued = [job for owner in owners for job in query_squeue_of_user(owner)]
    return [_read_listed_run_state(paths, snapshot, queued) for paths in runs]


class RunStateCache:
    def __init__(self) -> None:
        self._queue = QueuePoller()
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[Path, bool], ...], tuple[float, list[str]]] = {}

    def get_states(self, runs: Sequence[RunPaths]) -> list[str]:
        """State of each run, asked again when one has ended and after `MIN_QUERY_INTERVAL_S`."""
        key = tuple((run.root, run.finished_marker.exists()) for run in runs)
        with self._lock:
            asked_at, states = self._known.get(key, (-math.inf, []))
            if time.monotonic() - asked_at > max(MIN_QUERY_INTERVAL_S, self._queue.pause_s):
                states = [one.run_state for one in fetch_states_of_runs(runs, self._queue)]
                self._known[key] = time.monotonic(), states
            return states


def _list_job_ids_of_unfinished_run(paths: RunPaths) -> tuple[str, ...]:
    with contextlib.suppress(ArealError, OSError):  # its state says why
        return () if paths.finished_marker.exists() else list_recorded_job_ids(paths)
    return ()


def _read_listed_run_state(
    paths: RunPaths, snapshot: QueueSnapshot, queued: Sequence[SlurmJobRecord]
) -> ListedRunState:
    try:
        jobs = build_run_jobs(paths, snapshot, list_unrecorded_live_jobs(paths, queued))
        return ListedRunState(get_run_state(jobs), tuple(describe_unrecorded_jobs(jobs)))
    except (ArealError, OSError) as error:
        return ListedRunState("unreadable", (f"state unreadable: {paths.root}: {error}",))


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def _format_last_value(progress: RunProgress, metric_name: str) -> str:
    values = [row[metric_name] for row in progress.snapshot.steps if metric_name in row]
    return format_metric(values[-1], ".3f") if values else "-"


def label_differing_keys(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The keys whose values differ among resolved recipes, with the shortest name that tells.

    Those of which nothing can be read, as another user's, take no part.
    """
    flat = list(filter(None, map(flatten_keys, recipes)))
    keys = sorted(
        key
        for key in {key for one in flat for key in one}
        if key not in RUN_NAME_KEYS and len({repr(one.get(key)) for one in flat}) > 1
    )
    lasts = [key.rpartition(".")[2] for key in keys]
    return [
        (key, last if lasts.count(last) == 1 else key)
        for key, last in zip(keys, lasts, strict=True)
    ]
