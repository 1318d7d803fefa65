"""Requests to Slurm and launch files for the jobs of a run. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.jobs.caretaker import CaretakerConfig
from areal_hpc.jobs.environment import build_role_variables, get_interpreters
from areal_hpc.launch.plan import MAX_CONSECUTIVE_SERVICE_RESTARTS, JobStage, plan_run
from areal_hpc.launch.prepared_run import PreparedRun, StagePlanner
from areal_hpc.launch.resources.node_shares import add_cpu_and_memory_options
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import (
    REQUEUE_MARGIN_S,
    JobSpec,
    LaunchFile,
    SlurmLaunchInfo,
    list_unexpired_excluded_nodes,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.privacy import UMASKS
from areal_hpc.slurm.batch_script.script import JobRequest, RunContext, build_job_requests
from areal_hpc.slurm.batch_script.successors import (
    build_dependency_on_job_or_successors,
    build_job_id_placeholders,
)

MIN_JOB_START_UP_S = 60.0
"""A start of a job takes longer: SGLang and Megatron are imported, and a model is loaded."""


def build_remaining_job_requests(
    recipe: Recipe,
    working_folder: Path,
    after_job_ids: Sequence[str] = (),
    plan: StagePlanner | None = None,
) -> list[JobRequest]:
    """Requests to Slurm for all that is left of a run; nothing is written.

    Numbers that Slurm has not given out yet are spelt `SFT_JOBID`.

    Raises:
        RecipeError: Jobs do not fit the nodes; every misfit at once.
    """
    paths = RunPaths(recipe.run_dir.resolve())
    context = build_run_context(recipe, paths, get_interpreters(recipe), working_folder)
    planned = (plan or plan_run)(recipe, paths, None)
    stages = [one for one in planned if not one.done_marker.exists()]
    jobs = [job for stage in stages for job in stage.jobs]
    slurm = add_cpu_and_memory_options(recipe, jobs)
    requests = {request.job: request for request in build_job_requests(jobs, slurm, context)}
    if problems := _find_short_time_limit_problems(recipe, requests.values()):
        raise RecipeError.from_problems(problems)
    dependency = build_afterok_dependency(after_job_ids)
    for stage in stages:
        for job in stage.jobs if dependency else ():
            requests[job.name] = requests[job.name].with_dependency(dependency)
        leading = build_job_id_placeholders(stage.leader.name, recipe.cluster.slurm.successors)
        dependency = build_dependency_on_job_or_successors(leading)
    return list(requests.values())


def build_requests_of_stage(
    stage: JobStage, recipe: Recipe, prepared_run: PreparedRun
) -> Iterator[tuple[JobRequest, LaunchFile]]:
    """Each job of a stage: the request to Slurm, and what its supervisors are told."""
    place = build_run_context(recipe, prepared_run.paths, prepared_run.pythons, Path.cwd())
    slurm = add_cpu_and_memory_options(recipe, stage.jobs)
    requests = build_job_requests(stage.jobs, slurm, place)
    for spec, request in zip(stage.jobs, requests, strict=True):
        yield request, build_slurm_launch_file(spec, stage, request, recipe, prepared_run)


def build_run_context(
    recipe: Recipe, paths: RunPaths, pythons: dict[str, str], working_folder: Path
) -> RunContext:
    """Options that all jobs of a run share."""
    return RunContext(
        name=f"{recipe.experiment_name}-{recipe.trial_name}",
        run_dir=paths.root,
        jobs_dir=paths.jobs_dir,
        pythons=pythons,
        working_folder=working_folder,
        mounted=(recipe.model.path.resolve(),) if recipe.model.path else (),
        excluded_nodes=tuple(sorted(list_unexpired_excluded_nodes(paths.excluded_nodes))),
    )


def build_slurm_launch_file(
    spec: JobSpec, stage: JobStage, request: JobRequest, recipe: Recipe, prepared_run: PreparedRun
) -> LaunchFile:
    """Launch facts for the supervisors of a job under Slurm."""
    cluster, paths = recipe.cluster, prepared_run.paths
    network = cluster.slurm.network
    sbatch_flags = cluster.slurm.get_options_of_job(spec.name).sbatch or {}
    before = prepared_run.remaining_stages[: prepared_run.remaining_stages.index(stage)]
    return LaunchFile(
        job=_add_caretaker(spec, stage, paths),
        job_dir=str(paths.job(spec.name).root),
        log_dir=str(paths.log_dir(prepared_run.attempt)),
        events=str(paths.events),
        pythons=prepared_run.pythons,
        variables=build_role_variables(recipe, network.build_environment_variables()),
        recipe=str(paths.recipe),
        umask=UMASKS[cluster.readable_by],
        stop_grace_s=cluster.stop_grace_s,
        slurm=SlurmLaunchInfo(
            submissions=str(paths.submissions),
            script=str(paths.job(spec.name).script),
            excluded_nodes=str(paths.excluded_nodes),
            excluded_by_recipe=str(sbatch_flags.get("exclude", "")),
            job_name=request.name,
            comment=request.comment,
            cancelled=str(paths.cancelled_marker),
            interface=network.interface,
            progress=str(stage.progress or paths.metrics),
            done_marker=str(stage.done_marker),
            prerequisite=str(before[-1].done_marker) if before else "",
        ),
    )


def _add_caretaker(spec: JobSpec, stage: JobStage, paths: RunPaths) -> JobSpec:
    if not stage.others:
        return spec
    others = tuple(job.name for job in stage.others)
    config = CaretakerConfig(
        run_dir=paths.root, job=spec.name, leader=stage.leader.name, others=others
    )
    caretaker = config.build_process_spec(
        "caretaker", tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS
    )
    return msgspec.structs.replace(spec, processes=[*spec.processes, caretaker])


def build_afterok_dependency(job_ids: Sequence[str]) -> str:
    return f"afterok:{':'.join(job_ids)}" if job_ids else ""


def _find_short_time_limit_problems(
    recipe: Recipe, requests: Iterable[JobRequest]
) -> list[Problem]:
    least_s = MIN_JOB_START_UP_S + recipe.cluster.stop_grace_s + REQUEUE_MARGIN_S
    return [
        Problem(
            f"the time limit of job {one.job} is {one.shape.time_limit_minutes} min; its start, "
            f"last checkpoint and requeue take at least {least_s / 60:.1f} min",
            "cluster.slurm.time_limit_minutes",
            "give it a longer limit: a run resumes at each, so hours are better than minutes",
        )
        for one in requests
        if one.shape.time_limit_minutes * 60 <= least_s
    ]
