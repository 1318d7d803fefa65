"""Comparison of runs: `areal-hpc list`."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.errors import ArealError
from areal_hpc.metrics.step_line import format_metric
from areal_hpc.recipe.keys import flatten_keys, flatten_keys_hiding_private_values, rank_section
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.state.jobs import describe_unrecorded_jobs
from areal_hpc.view.state.run_view import RunView, view_runs
from areal_hpc.view.tables import format_table

RUN_NAME_KEYS = ("experiment_name", "trial_name")
MAX_SHOWN_KEYS = 6
MAX_VALUE_CHARS = 40


def compare_runs(
    runs: Sequence[RunPaths], queue: QueuePoller, *, shows_all_keys: bool = False
) -> list[str]:
    """A table of runs, then their jobs that Slurm has and nobody recorded.

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
        usual_first = sorted(differing, key=lambda one: rank_section(one[0]))
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
