"""Requests to Slurm and launch files for the jobs of a run. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.jobs.caretaker import POLL_S, WAITING_JOB_POLL_S, CaretakerConfig
from areal_hpc.jobs.environment import build_role_variables, get_interpreters
from areal_hpc.jobs.job_status import StageJobs
from areal_hpc.launch.plan import MAX_CONSECUTIVE_SERVICE_RESTARTS, JobStage, plan_run
from areal_hpc.launch.prepared_run import PreparedRun, StagePlanner
from areal_hpc.launch.resources.node_shares import add_cpu_and_memory_options
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.folders import UMASKS
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    REQUEUE_MARGIN_S,
    JobSpec,
    LaunchFile,
    ProcessSpec,
    SlurmLaunchInfo,
    list_unexpired_excluded_nodes,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.batch_script.script import JobRequest, RunContext, build_job_requests
from areal_hpc.slurm.resubmit import build_caretaker_dependency

MIN_JOB_START_UP_S = 60.0
"""A start of a job takes longer: SGLang and Megatron are imported, and a model is loaded."""


def build_remaining_job_requests(
    recipe: Recipe,
    working_folder: Path,
    after_job_ids: Sequence[str] = (),
    plan: StagePlanner | None = None,
) -> list[JobRequest]:
    """Requests to Slurm for all that is left of a run, its caretaker last; nothing is written.

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
    if not stages:
        return []
    for job in stages[0].jobs if after_job_ids else ():
        requests[job.name] = requests[job.name].with_dependency(
            build_afterok_dependency(after_job_ids), stays_if_never_met=True
        )
    for before, stage in pairwise(stages):
        for job in stage.jobs:
            leader_id = f"{before.leader.name.upper()}_JOBID"
            requests[job.name] = requests[job.name].with_dependency(f"afterok:{leader_id}")
    job_ids = {name: f"{name.upper()}_JOBID" for name in requests}
    caretaker = build_caretaker_request(recipe, context, job_ids, stages[-1].leader.name)
    return [*requests.values(), caretaker]


def build_caretaker_request(
    recipe: Recipe, context: RunContext, job_ids: Mapping[str, str], leader: str
) -> JobRequest:
    """The job that waits until all others of a run, `job_ids` by name, are over.

    `leader` is the leading job of the last stage: when that ends well Slurm removes it.
    """
    spec = JobSpec(CARETAKER_JOB, CaretakerConfig.ROLE, [])
    (request,) = build_job_requests([spec], recipe.cluster.slurm, context)
    others = [job_id for name, job_id in job_ids.items() if name != leader]
    return request.with_dependency(build_caretaker_dependency(job_ids[leader], others))


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
        name=paths.queue_name,
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
    if stage.others:
        caretaker = _build_caretaker_process(prepared_run.paths, spec.name, [stage])
        spec = msgspec.structs.replace(spec, processes=[*spec.processes, caretaker])
    return _build_launch_file(spec, stage, request, recipe, prepared_run)


def build_caretaker_launch_file(
    request: JobRequest, recipe: Recipe, prepared_run: PreparedRun
) -> LaunchFile:
    """Launch facts of the job that waits behind all others of a run."""
    stages = prepared_run.remaining_stages
    process = _build_caretaker_process(prepared_run.paths, CARETAKER_JOB, stages)
    spec = JobSpec(CARETAKER_JOB, CaretakerConfig.ROLE, [process])
    return _build_launch_file(spec, stages[-1], request, recipe, prepared_run)


def _build_caretaker_process(paths: RunPaths, job: str, stages: Sequence[JobStage]) -> ProcessSpec:
    waits_behind = job == CARETAKER_JOB
    config = CaretakerConfig(
        run_dir=paths.root,
        job=job,
        stages=tuple(
            StageJobs(
                leader=stage.leader.name,
                others=tuple(one.name for one in stage.others),
                done_marker=stage.done_marker,
            )
            for stage in stages
        ),
        poll_s=WAITING_JOB_POLL_S if waits_behind else POLL_S,
    )
    return config.build_process_spec(
        CARETAKER_JOB,
        tasks="first",
        restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS,
        ends_job=waits_behind,
    )


def _build_launch_file(
    spec: JobSpec, stage: JobStage, request: JobRequest, recipe: Recipe, prepared_run: PreparedRun
) -> LaunchFile:
    cluster, paths = recipe.cluster, prepared_run.paths
    network = cluster.slurm.network
    sbatch_flags = cluster.slurm.get_options_of_job(spec.name).sbatch
    return LaunchFile(
        job=spec,
        job_dir=str(paths.job(spec.name).root),
        log_dir=str(paths.log_dir(prepared_run.attempt)),
        events=str(paths.events),
        pythons=prepared_run.pythons,
        variables=build_role_variables(recipe, network.build_environment_variables()),
        recipe=str(paths.recipe),
        umask=UMASKS[cluster.readable_by],
        stop_grace_s=cluster.stop_grace_s,
        slurm=SlurmLaunchInfo(
            excluded_by_recipe=str(sbatch_flags.get("exclude", "")),
            interface=network.interface,
            progress=str(stage.progress or paths.metrics),
            done_marker=str(stage.done_marker),
        ),
    )


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
