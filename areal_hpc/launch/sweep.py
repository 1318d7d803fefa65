"""One recipe with several values of a key: a run of its own for each value."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.launch import slurm_launcher
from areal_hpc.launch.prepared_run import find_live_jobs, is_run_finished
from areal_hpc.launch.slurm_requests import build_remaining_job_requests
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths


def load_sweep(load: Callable[[Sequence[str]], Recipe], key_and_values: str) -> list[Recipe]:
    """The runs that `KEY=V1,V2,...` asks for. Each run's trial is called after its value.

    Raises:
        RecipeError: It asks for no sweep, or two runs would share a directory.
    """
    key, _, listed = key_and_values.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not key or not values or len(set(values)) < len(values):
        raise RecipeError(
            f"expected a key and different values for it, got {key_and_values!r}",
            hint="write --sweep trainer.optimizer.lr=1e-5,2e-5,4e-5",
        )
    trial_name = load(()).trial_name
    runs = []
    for value in values:
        suffix = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{key.rpartition('.')[2]}-{value}")
        runs.append(load((f"{key}={value}", f"trial_name={trial_name}-{suffix}")))
    if len({run.run_dir for run in runs}) < len(runs):
        raise RecipeError("several runs of the sweep would share a directory", key=key)
    return runs


def submit_sweep(
    runs: Sequence[Recipe],
    *,
    print_line: Callable[[str], None],
    after: Sequence[str] = (),
    fresh: bool = False,
) -> None:
    """Submit run after run; those that are finished, or whose jobs wait or run, stay as they are.

    So the same command continues a sweep of which Slurm took a part.
    """
    for run in runs:  # what does not fit is refused before any is submitted
        build_remaining_job_requests(run, Path.cwd(), after)
    for run in runs:
        paths = RunPaths(run.run_dir.resolve())
        print_line(f"run      {paths.root}")
        if not fresh and is_run_finished(run, paths):
            print_line("finished already")
        elif not fresh and (live := find_live_jobs(paths)):
            print_line(f"kept     {len(live)} jobs wait or run")
        else:
            slurm_launcher.submit(run, print_line=print_line, after=after, fresh=fresh)
