"""One recipe with several values of a key: a run for each, and a job array for each job."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.jobs.environment import get_interpreters
from areal_hpc.jobs.supervisor import run_task
from areal_hpc.launch.plan import JobStage, plan_run
from areal_hpc.launch.prepared_run import PreparedRun, prepare_and_lock_run
from areal_hpc.launch.resources.node_shares import add_cpu_and_memory_options
from areal_hpc.launch.slurm_launcher import (
    cancel_jobs_on_failure,
    record_if_submission_is_refused,
    record_job_submission,
    release_submitted_jobs,
)
from areal_hpc.launch.slurm_requests import (
    build_afterok_dependency,
    build_remaining_job_requests,
    build_run_context,
    build_slurm_launch_file,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.batch_script.script import JobRequest, RunContext, build_job_requests
from areal_hpc.slurm.submit import (
    SubmittedJob,
    raise_if_federated,
    submit_held_array,
    write_member_payload,
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep. Their arrays' files lie where the recipe's own run would."""

    base: Recipe
    runs: tuple[Recipe, ...]

    @property
    def array_paths(self) -> RunPaths:
        return RunPaths(self.base.run_dir.resolve())


def parse_sweep(load: Callable[[Sequence[str]], Recipe], key_and_values: str) -> Sweep:
    """The sweep that `KEY=V1,V2,...` asks for. Each run's trial is called after its value.

    Raises:
        RecipeError: It asks for no sweep, or the runs could not be one array.
    """
    key, _, listed = key_and_values.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not key or not values or len(set(values)) < len(values):
        raise RecipeError(
            f"expected a key and different values for it, got {key_and_values!r}",
            hint="write --sweep trainer.optimizer.lr=1e-5,2e-5,4e-5",
        )
    base = load(())
    runs = []
    for value in values:
        suffix = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{key.rpartition('.')[2]}-{value}")
        runs.append(load((f"{key}={value}", f"trial_name={base.trial_name}-{suffix}")))
    sweep, problems = Sweep(base, tuple(runs)), []
    if len({run.run_dir for run in runs}) < len(runs):
        problems.append(Problem("several runs of the sweep would share a directory", key))
    plans = [plan_run(run, RunPaths(run.run_dir.resolve()), None) for run in runs]
    left = [[stage.name for stage in one if not stage.done_marker.exists()] for one in plans]
    asked = [
        (
            run.cluster,
            [
                (request.job, request.shape)
                for request in build_remaining_job_requests(run, Path.cwd())
            ],
        )
        for run in runs
    ]
    if any(one != left[0] for one in left):
        message = "the runs of the sweep are not equally far: " + ", ".join(
            f"{run.trial_name} has {' and '.join(names) or 'nothing'} left"
            for run, names in zip(runs, left, strict=True)
        )
        hint = "continue them one by one: areal-hpc resume RUN"
        problems.append(Problem(message, key, hint))
    elif any(one != asked[0] for one in asked):
        message = "the runs of a sweep must request the same resources"
        hint = "submit them one by one, each with a trial_name of its own"
        problems.append(Problem(message, key, hint))
    if sweep.array_paths.recipe.exists():
        message = f"there is a run in {sweep.array_paths.root}, where the arrays' files would lie"
        problems.append(Problem(message, "trial_name", "give the sweep another trial_name"))
    if any(run.cluster.slurm.successors for run in runs):
        message = "members of a sweep's arrays have no successors"
        hint = "submit the runs one by one, each with a trial_name of its own, or set it to 0"
        problems.append(Problem(message, "cluster.slurm.successors", hint))
    if problems:
        raise RecipeError.from_problems(problems)
    return sweep


def build_array_requests(
    sweep: Sweep, working_folder: Path, after_job_ids: Sequence[str]
) -> list[JobRequest]:
    place = _build_array_context(sweep, working_folder)
    return build_remaining_job_requests(
        sweep.runs[0], working_folder, after_job_ids, run_context=place
    )


def _build_array_context(sweep: Sweep, working_folder: Path) -> RunContext:
    first = sweep.runs[0]
    place = build_run_context(first, sweep.array_paths, get_interpreters(first), working_folder)
    return replace(
        place,
        name=f"{sweep.base.experiment_name}-{sweep.base.trial_name}",
        mounted=(*place.mounted, *(run.run_dir.resolve() for run in sweep.runs)),
        is_array=True,
    )


def submit_sweep(
    sweep: Sweep,
    *,
    print_line: Callable[[str], None],
    after: Sequence[str] = (),
    fresh: bool = False,
) -> None:
    raise_if_federated()
    with ExitStack() as stack:
        ready = [
            stack.enter_context(
                prepare_and_lock_run(run, print_line=print_line, fresh=fresh, submits=True)
            )
            for run in sweep.runs
        ]
        submitted = _submit_held_arrays_of_all_jobs(
            sweep, ready, build_afterok_dependency(after), print_line
        )
        release_submitted_jobs(submitted, *(one.paths for one in ready))


def _submit_held_arrays_of_all_jobs(
    sweep: Sweep,
    prepared_runs: Sequence[PreparedRun],
    dependency: str,
    print_line: Callable[[str], None],
) -> list[str]:
    to_release: list[str] = []
    submitted: list[str] = []
    with cancel_jobs_on_failure(print_line, submitted):
        for stages in zip(*(one.remaining_stages for one in prepared_runs), strict=True):
            leading = ""
            for specs in zip(*(stage.jobs for stage in stages), strict=True):
                jobs, request = _submit_array_of_job(
                    sweep, prepared_runs, stages, specs, dependency, print_line
                )
                submitted += [job.job_id for job in jobs]
                to_release += [] if request.stays_held else [job.job_id for job in jobs]
                for one, job in zip(prepared_runs, jobs, strict=True):
                    files = one.paths.job(specs[0].name)
                    write_member_payload(request.submitit_dir, job.job_id, files, run_task)
                    record_job_submission(one, specs[0].name, job)
                first, last = jobs[0].job_id, jobs[-1].job_id
                leading = leading or first.partition("_")[0]
                print_line(f"array    {specs[0].name:<9} {first} to {last}, {request.shape}")
            dependency = f"aftercorr:{leading}"  # each run's jobs wait for that run's
    return to_release


def _submit_array_of_job(
    sweep: Sweep,
    prepared_runs: Sequence[PreparedRun],
    stages: Sequence[JobStage],
    specs: Sequence[JobSpec],
    dependency: str,
    print_line: Callable[[str], None],
) -> tuple[list[SubmittedJob], JobRequest]:
    slurm = add_cpu_and_memory_options(sweep.base, specs[:1])
    request = build_job_requests(specs[:1], slurm, _build_array_context(sweep, Path.cwd()))[0]
    alone, launches = [], []
    for run, one, stage, spec in zip(sweep.runs, prepared_runs, stages, specs, strict=True):
        place = build_run_context(run, one.paths, one.pythons, Path.cwd())
        alone += build_job_requests([spec], add_cpu_and_memory_options(run, [spec]), place)
        launches.append(build_slurm_launch_file(spec, stage, alone[-1], run, one))
    asked = request.with_dependency(dependency) if dependency else request
    with record_if_submission_is_refused(request.job, *(one.paths for one in prepared_runs)):
        return submit_held_array(asked, alone, launches, run_task, print_line), request
