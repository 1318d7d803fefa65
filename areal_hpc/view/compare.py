"""Comparison of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.recipe.yaml_tree import leaves
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.commands import has_slurm
from areal_hpc.slurm.queue import Look, Queue
from areal_hpc.view.jobs import ids_of, judge_jobs, state_of_run
from areal_hpc.view.live_progress import shown
from areal_hpc.view.progress_summary import Advance, read_advance
from areal_hpc.view.tables import aligned

NAMES = ("experiment_name", "trial_name")
"""Keys that tell runs apart without telling why they differ."""


def compare(layouts: Sequence[RunPaths], queue: Queue) -> list[str]:
    """A table of runs. Slurm is asked once, about all jobs of all runs that are not finished."""
    advances = [read_advance(layout) for layout in layouts]
    states = _states(layouts, queue)
    differing = differing_keys([advance.recipe for advance in advances])
    head = ("run", "state", "step", "reward", "held-out", *(short for _, short in differing))
    rows = [
        (
            f"{layout.root.parent.name}/{layout.root.name}",
            state,
            f"{advance.step}/{advance.total_steps}",
            _last(advance, "reward/mean"),
            _last(advance, "eval/reward"),
            *(str(leaves(advance.recipe).get(key, "-")) for key, _ in differing),
        )
        for layout, advance, state in zip(layouts, advances, states, strict=True)
    ]
    return aligned([head, *rows])


def _states(layouts: Sequence[RunPaths], queue: Queue) -> list[str]:
    unfinished = [layout for layout in layouts if not layout.finished_marker.exists()]
    ids = [job_id for layout in unfinished for job_id in ids_of(layout)]
    look = queue.look(ids) if has_slurm() else Look(silence="there is no Slurm on this machine")
    return [state_of_run(judge_jobs(layout, look)) for layout in layouts]


def _last(advance: Advance, name: str) -> str:
    values = [row[name] for row in advance.snapshot.steps if name in row]
    return shown(values[-1], ".3f") if values else "-"


def differing_keys(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The keys whose values are not the same in all recipes, with the shortest name that tells.

    Args:
        recipes: As they lie in run directories: resolved, with every key.
    """
    flat = [leaves(recipe) for recipe in recipes]
    keys = sorted(
        key
        for key in {key for one in flat for key in one}
        if key not in NAMES and len({repr(one.get(key)) for one in flat}) > 1
    )
    lasts = [key.rpartition(".")[2] for key in keys]
    return [
        (key, last if lasts.count(last) == 1 else key)
        for key, last in zip(keys, lasts, strict=True)
    ]
