"""One recipe with several values of a key: a run for each, and a job array for each job."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.jobs.environment import get_interpreters
from areal_hpc.jobs.supervisor import run_job
from areal_hpc.launch.prepared_run import PreparedRun, prepare_run
from areal_hpc.launch.slurm_launcher import (
    build_dependency,
    build_launch_file,
    build_requests,
    build_run_context,
    record_job,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import Submission
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.cancel import cancel_submitted
from areal_hpc.slurm.script import JobRequest, RunContext, build_job_requests
from areal_hpc.slurm.submit import submit_array


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep. Their arrays' files lie where the recipe's own run would."""

    base: Recipe
    runs: tuple[Recipe, ...]

    @property
    def layout(self) -> RunPaths:
        """The directory of the arrays' files; each run has a directory of its own beside it."""
        return RunPaths(self.base.run_dir.resolve())


def read_sweep(load: Callable[[Sequence[str]], Recipe], array: str) -> Sweep:
    """The sweep that `KEY=V1,V2,...` asks for.

    Args:
        load: Reads the recipe with further overrides.
        array: The key and its values. Each run's trial is called after its value.

    Raises:
        RecipeError: It asks for no sweep, or the runs could not be one array.
    """
    key, _, listed = array.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not key or not values or len(set(values)) < len(values):
        raise RecipeError(
            f"expected a key and different values for it, got {array!r}",
            hint="write --sweep trainer.optimizer.lr=1e-5,2e-5,4e-5",
        )
    base = load(())
    runs = []
    for value in values:
        suffix = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{key.rpartition('.')[2]}-{value}")
        runs.append(load((f"{key}={value}", f"trial_name={base.trial_name}-{suffix}")))
    sweep = Sweep(base, tuple(runs))
    _check(sweep, key)
    return sweep


def _check(sweep: Sweep, key: str) -> None:
    """Members of an array ask for the same, and have directories of their own."""
    first, problems = sweep.runs[0], []
    if len({run.run_dir for run in sweep.runs}) < len(sweep.runs):
        problems.append(Problem("several runs of the sweep would share a directory", key))
    shapes = [
        [(request.job, request.shape) for request in build_requests(run, Path.cwd())]
        for run in sweep.runs
    ]
    if any(run.cluster != first.cluster for run in sweep.runs) or any(
        shape != shapes[0] for shape in shapes
    ):
        problems.append(
            Problem(
                "the runs of a sweep must request the same resources",
                key,
                "submit them one by one, each with a trial_name of its own",
            )
        )
    if sweep.layout.recipe.exists():
        problems.append(
            Problem(
                f"there is a run in {sweep.layout.root}, where the arrays' files would lie",
                "trial_name",
                "give the sweep another trial_name",
            )
        )
    if problems:
        raise RecipeError.of(problems)


def build_array_requests(
    sweep: Sweep, working_folder: Path, after: Sequence[str]
) -> list[JobRequest]:
    """What every array would ask for; nothing is written."""
    place = _place(sweep, working_folder)
    return build_requests(sweep.runs[0], working_folder, after, place=place)


def _place(sweep: Sweep, working_folder: Path) -> RunContext:
    first = sweep.runs[0]
    place = build_run_context(first, sweep.layout, get_interpreters(first), working_folder)
    return replace(
        place,
        name=f"{sweep.base.experiment_name}-{sweep.base.trial_name}",
        mounted=(*place.mounted, *(run.run_dir.resolve() for run in sweep.runs)),
        is_array=True,
    )


def submit_sweep(
    sweep: Sweep,
    *,
    command_line: Sequence[str],
    say: Callable[[str], None],
    after: Sequence[str] = (),
    fresh: bool = False,
) -> list[Submission]:
    """Submit every run of a sweep: all of their jobs are queued, or none.

    Raises:
        RecipeError: Something the recipe names is missing or wrong, or Slurm refuses a job.
        ClusterError: There is no Slurm here, or jobs of a run wait or run.
    """
    with ExitStack() as stack:
        ready = [
            stack.enter_context(prepare_run(run, command_line=command_line, say=say, fresh=fresh))
            for run in sweep.runs
        ]
        return _submit_arrays(sweep, ready, after, say)


def _submit_arrays(
    sweep: Sweep, ready: Sequence[PreparedRun], after: Sequence[str], say: Callable[[str], None]
) -> list[Submission]:
    place, slurm = _place(sweep, Path.cwd()), sweep.base.cluster.slurm
    own_places = [
        build_run_context(run, one.layout, one.pythons, Path.cwd())
        for run, one in zip(sweep.runs, ready, strict=True)
    ]
    submitted: list[Submission] = []
    dependency = build_dependency(after)
    try:
        for stages in zip(*(one.stages for one in ready), strict=True):
            leading = ""
            for specs in zip(*(stage.jobs for stage in stages), strict=True):
                request = build_job_requests(specs[:1], slurm, place)[0]
                alone = [
                    build_job_requests([spec], slurm, own)[0]
                    for spec, own in zip(specs, own_places, strict=True)
                ]
                launches = [
                    build_launch_file(spec, stage, run, one)
                    for spec, stage, run, one in zip(specs, stages, sweep.runs, ready, strict=True)
                ]
                asked = request.depending_on(dependency) if dependency else request
                job_ids = submit_array(asked, alone, launches, run_job)
                for one, job_id in zip(ready, job_ids, strict=True):
                    submitted.append(record_job(one, specs[0].name, job_id))
                leading = leading or job_ids[0].partition("_")[0]
                say(f"array    {specs[0].name:<9} {job_ids[0]} to {job_ids[-1]}, {request.shape}")
            dependency = f"aftercorr:{leading}"  # each run's jobs wait for that run's
    except BaseException:  # boundary: half a sweep would wait for its other half, and cost
        cancel_submitted([submission.job_id for submission in submitted])
        raise
    return submitted
