"""Comparison of several runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.loading import flatten_keys
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.commands import has_slurm
from areal_hpc.slurm.queue import QueuePoller, QueueSnapshot
from areal_hpc.slurm.run_jobs import list_recorded_job_ids
from areal_hpc.view.jobs import build_run_jobs, get_run_state
from areal_hpc.view.live_progress import format_metric
from areal_hpc.view.summary import RunProgress, read_run_progress
from areal_hpc.view.tables import format_table

RUN_NAME_KEYS = ("experiment_name", "trial_name")
"""Keys that tell runs apart without telling why they differ."""


def compare_runs(runs: Sequence[RunPaths], queue: QueuePoller) -> list[str]:
    """A table of runs. Slurm is asked once, about all jobs of all runs that are not finished.

    A run whose recipe is damaged is named below the table.
    """
    notes, advance_by_run = [], {}
    for paths in runs:
        try:
            advance_by_run[paths] = read_run_progress(paths)
        except RecipeError as error:
            notes.append(f"left out: {paths.root}: {error}")
    advances = list(advance_by_run.values())
    states = _read_states(list(advance_by_run), queue)
    differing = find_differing_keys([advance.recipe for advance in advances])
    head = ("run", "state", "step", "reward", "held-out", *(short for _, short in differing))
    rows = [
        (
            f"{paths.root.parent.name}/{paths.root.name}",
            state,
            f"{advance.step}/{advance.total_steps or '?'}",
            _format_last_value(advance, "reward/mean"),
            _format_last_value(advance, "eval/reward"),
            *(str(flatten_keys(advance.recipe).get(key, "-")) for key, _ in differing),
        )
        for (paths, advance), state in zip(advance_by_run.items(), states, strict=True)
    ]
    return [*format_table([head, *rows]), *notes]


def _read_states(runs: Sequence[RunPaths], queue: QueuePoller) -> list[str]:
    unfinished = [paths for paths in runs if not paths.finished_marker.exists()]
    ids = [job_id for paths in unfinished for job_id in list_recorded_job_ids(paths)]
    snapshot = (
        queue.poll(ids)
        if has_slurm()
        else QueueSnapshot(outage="there is no Slurm on this machine")
    )
    return [get_run_state(build_run_jobs(paths, snapshot)) for paths in runs]


def _format_last_value(advance: RunProgress, name: str) -> str:
    values = [row[name] for row in advance.snapshot.steps if name in row]
    return format_metric(values[-1], ".3f") if values else "-"


def find_differing_keys(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The keys whose values differ among resolved recipes, with the shortest name that tells."""
    flat = [flatten_keys(recipe) for recipe in recipes]
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
