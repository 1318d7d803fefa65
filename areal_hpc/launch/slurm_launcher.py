"""Slurm launcher: it builds the requests for a run's jobs, submits them, and exits.

Unlike under the foreground launcher, the jobs submit each other again and end by themselves.
"""

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError, Problem, RecipeError
from areal_hpc.jobs.caretaker import POLL_S, WAITING_JOB_POLL_S, CaretakerConfig
from areal_hpc.jobs.config import get_interpreters
from areal_hpc.jobs.job_status import StageJobs
from areal_hpc.jobs.supervisor import run_task
from areal_hpc.launch.plan import MAX_CONSECUTIVE_SERVICE_RESTARTS, JobStage, StagePlanner, plan_run
from areal_hpc.launch.prepare import PreparedRun, prepare_run
from areal_hpc.launch.resources import add_node_share_options
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    REQUEUE_MARGIN_S,
    JobSpec,
    LaunchFile,
    ProcessSpec,
    SlurmLaunchInfo,
    Submission,
    list_unexpired_excluded_nodes,
    record_submission,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, EventLog
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.batch_script import (
    JobRequest,
    RunContext,
    build_job_requests,
    compute_resources,
)
from areal_hpc.slurm.script_submission import (
    build_caretaker_dependency,
    release_jobs,
    try_to_cancel_jobs,
)
from areal_hpc.slurm.states import JobPhase
from areal_hpc.slurm.submit import (
    refuse_federation,
    render_script,
    submit_held_job,
    write_job_files,
)
from areal_hpc.wire.fault_points import fault_point

MIN_JOB_START_UP_S = 60.0
"""Lower bound of a job's start: it imports SGLang and Megatron, and loads a model."""


def submit(
    recipe: Recipe,
    *,
    print_line: Callable[[str], None],
    after: Sequence[str] = (),
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    joins_live_jobs: bool = False,
    plan: StagePlanner = plan_run,
) -> None:
    """Submit all remaining jobs of a run, or none.

    Jobs are submitted held, and released when all of them are recorded. With `joins_live_jobs`
    pending and running jobs stay, recorded and released; only missing jobs are submitted.
    """
    # Refuse requests that do not fit before anything is written.
    refuse_federation()
    build_remaining_job_requests(recipe, Path.cwd(), plan=plan)
    with prepare_run(
        recipe,
        print_line=print_line,
        fresh=fresh,
        sys_path=sys_path,
        joins_live_jobs=joins_live_jobs,
        plan=plan,
        submits=True,
    ) as ready:
        _RunSubmission(recipe, ready, print_line).submit(after)


class _RunSubmission:
    def __init__(
        self, recipe: Recipe, prepared_run: PreparedRun, print_line: Callable[[str], None]
    ) -> None:
        self._recipe = recipe
        self._prepared_run = prepared_run
        self._paths = prepared_run.paths
        self._print_line = print_line
        self._events = EventLog(prepared_run.paths.events, "launcher")
        self._ids: dict[str, str] = {}
        """Slurm id of each job in the queue."""
        self._new_ids: list[str] = []
        self._to_release: list[str] = []

    def submit(self, after: Sequence[str]) -> None:
        self._adopt_live_jobs()
        try:
            self._submit_stages(after)
            self._submit_caretaker()
        except BaseException:  # boundary: the jobs of half a run would wait for the others
            if (error := try_to_cancel_jobs(self._new_ids)) is not None:
                ids, reason = ", ".join(self._new_ids), error.problems[0].message
                self._print_line(f"jobs {ids} stay in the queue, held: {reason}")
            raise
        fault_point("submit.before_release")
        try:
            release_jobs(self._to_release)
        except ClusterError as error:
            command = f"areal-hpc resume {shlex.quote(str(self._paths.root))}"
            raise ClusterError(
                f"all jobs are submitted, and held: {error.problems[0].message}",
                hint=f"when `scontrol ping` succeeds, release them: {command}",
            ) from error

    def _adopt_live_jobs(self) -> None:
        """Record the pending and running jobs; cancel an unrecorded duplicate of a job."""
        # Recorded jobs come first; the newest of them counts.
        for job in self._prepared_run.live_jobs:
            name, job_id = job.submission.job, job.submission.job_id
            if not job.is_recorded and name in self._ids:
                line = f"cancel   {name:<10} {job_id:<9} an unrecorded duplicate"
                self._print_line(line)
                if (error := try_to_cancel_jobs([job_id])) is not None:
                    raise error
                continue
            if not job.is_recorded:
                self._record(name, job_id, job.submission.token)
            state = "held, will be released" if job.is_held else job.slurm_record.state.meaning
            self._print_line(f"kept     {name:<10} {job_id:<9} {state}")
            self._ids[name] = job_id
        self._to_release += [
            job.submission.job_id
            for job in self._prepared_run.live_jobs
            if job.is_held and job.submission.job_id in self._ids.values()
        ]

    def _submit_stages(self, after: Sequence[str]) -> None:
        dependency = build_afterok_dependency(after)
        for number, stage in enumerate(self._prepared_run.remaining_stages):
            for request, launch in build_requests_of_stage(stage, self._recipe, self._prepared_run):
                if dependency:
                    request = request.with_dependency(dependency, stays_if_never_met=number == 0)
                if request.job not in self._ids:
                    self._submit_job(request, launch)
            dependency = build_afterok_dependency([self._ids[stage.leader.name]])

    def _submit_job(self, request: JobRequest, launch: LaunchFile) -> None:
        try:
            self._submit(request, launch)
        except (RecipeError, ClusterError) as error:  # noted for `areal-hpc why`
            problem = error.problems[0]
            self._events.record(
                SUBMISSION_REFUSED_EVENT,
                job=request.job,
                reason=problem.message,
                hint=problem.hint,
            )
            raise

    def _submit(self, request: JobRequest, launch: LaunchFile) -> None:
        job_id, token = submit_held_job(request, launch, run_task, self._print_line)
        self._new_ids.append(job_id)
        self._record(request.job, job_id, token)
        self._ids[request.job] = job_id
        self._to_release += [] if request.stays_held else [job_id]
        self._print_line(f"job      {request.job:<10} {job_id:<9} {request.shape}")

    def _record(self, job: str, job_id: str, token: str) -> None:
        submission = Submission(
            job=job,
            job_id=job_id,
            attempt=self._prepared_run.attempt,
            submitted_at=time.time(),
            script=str(self._paths.job(job).script),
            token=token,
        )
        record_submission(self._paths.submissions, submission)
        self._events.record("job_submitted", job=job, job_id=job_id)

    def _submit_caretaker(self) -> None:
        """Submit a caretaker that waits behind the jobs; the run starts even if it is refused."""
        ready = self._prepared_run
        stages = ready.remaining_stages
        ids = {job.name: self._ids[job.name] for stage in stages for job in stage.jobs}
        context = build_run_context(self._recipe, ready.paths, ready.pythons, Path.cwd())
        request = build_caretaker_request(self._recipe, context, ids, stages[-1].leader.name)
        launch = build_caretaker_launch_file(self._recipe, ready)
        try:
            if (own_id := self._ids.get(CARETAKER_JOB)) is None:
                self._submit(request, launch)
                return
            write_job_files(request, launch, run_task)
            live = {job.slurm_record.job_id: job.slurm_record.state for job in ready.live_jobs}
            # A running caretaker waits for this launcher, and then submits the next one.
            if live[own_id].phase is JobPhase.WAITING:
                dependency = str(request.parameters["dependency"])
                scontrol.update_waiting_job(own_id, "Dependency", dependency)
        except (RecipeError, ClusterError) as error:
            self._print_line(
                "note     no caretaker waits behind the jobs, so none submits them again if all "
                f"end at once: {error.problems[0].message}"
            )


def write_scripts(
    recipe: Recipe, *, print_line: Callable[[str], None], fresh: bool = False
) -> list[Path]:
    """Prepare a run, and write the scripts of its remaining jobs without submitting them."""
    build_remaining_job_requests(recipe, Path.cwd())
    with prepare_run(recipe, print_line=print_line, fresh=fresh) as ready:
        return [
            write_job_files(request, launch, run_task).script
            for stage in ready.remaining_stages
            for request, launch in build_requests_of_stage(stage, recipe, ready)
        ]


def build_remaining_job_requests(
    recipe: Recipe,
    working_folder: Path,
    after_job_ids: Sequence[str] = (),
    plan: StagePlanner = plan_run,
) -> list[JobRequest]:
    """Build the requests for the remaining jobs of a run, its caretaker last; write nothing.

    `SFT_JOBID` stands for the id of a job `sft` that is not submitted yet.

    Raises:
        RecipeError: Jobs do not fit the nodes; lists all problems.
    """
    paths = RunPaths(recipe.run_dir.resolve())
    context = build_run_context(recipe, paths, get_interpreters(recipe), working_folder)
    all_stages = plan(recipe, paths, None)
    stages = [stage for stage in all_stages if not stage.done_marker.exists()]
    jobs = [job for stage in stages for job in stage.jobs]
    slurm = add_node_share_options(recipe, jobs)
    requests = {request.job: request for request in build_job_requests(jobs, slurm, context)}
    if problems := _find_time_limit_problems(recipe, requests.values()):
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
    """Build the request for the caretaker, which waits until the run's `job_ids` have ended.

    `leader` is the leading job of the last stage: Slurm removes the caretaker when it succeeds.
    """
    spec = JobSpec(CARETAKER_JOB, CaretakerConfig.ROLE, [])
    (request,) = build_job_requests([spec], recipe.cluster.slurm, context)
    others = [job_id for name, job_id in job_ids.items() if name != leader]
    return request.with_dependency(build_caretaker_dependency(job_ids[leader], others))


def build_requests_of_stage(
    stage: JobStage, recipe: Recipe, prepared_run: PreparedRun
) -> Iterator[tuple[JobRequest, LaunchFile]]:
    """Build the Slurm request and the launch file of each job of a stage."""
    context = build_run_context(recipe, prepared_run.paths, prepared_run.pythons, Path.cwd())
    slurm = add_node_share_options(recipe, stage.jobs)
    requests = build_job_requests(stage.jobs, slurm, context)
    for spec, request in zip(stage.jobs, requests, strict=True):
        yield request, build_slurm_launch_file(spec, stage, recipe, prepared_run)


def build_run_context(
    recipe: Recipe, paths: RunPaths, pythons: dict[str, str], working_folder: Path
) -> RunContext:
    """Build the options that all jobs of a run share."""
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
    spec: JobSpec, stage: JobStage, recipe: Recipe, prepared_run: PreparedRun
) -> LaunchFile:
    """Build the launch file of a job; a caretaker is added if its stage has other jobs."""
    if stage.others:
        caretaker = _build_caretaker_process(prepared_run.paths, spec.name, [stage])
        spec = msgspec.structs.replace(spec, processes=[*spec.processes, caretaker])
    return _build_launch_file(spec, stage, recipe, prepared_run)


def build_caretaker_launch_file(recipe: Recipe, prepared_run: PreparedRun) -> LaunchFile:
    stages = prepared_run.remaining_stages
    process = _build_caretaker_process(prepared_run.paths, CARETAKER_JOB, stages)
    spec = JobSpec(CARETAKER_JOB, CaretakerConfig.ROLE, [process])
    return _build_launch_file(spec, stages[-1], recipe, prepared_run)


def _build_caretaker_process(paths: RunPaths, job: str, stages: Sequence[JobStage]) -> ProcessSpec:
    waits_behind = job == CARETAKER_JOB
    config = CaretakerConfig(
        run_dir=paths.root,
        job=job,
        stages=tuple(
            StageJobs(
                leader=stage.leader.name,
                others=tuple(other.name for other in stage.others),
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
    spec: JobSpec, stage: JobStage, recipe: Recipe, prepared_run: PreparedRun
) -> LaunchFile:
    network = recipe.cluster.slurm.network
    options = recipe.cluster.slurm.get_options_of_job(spec.name)
    info = SlurmLaunchInfo(
        excluded_by_recipe=str(options.sbatch.get("exclude", "")),
        interface=network.interface,
        progress=str(stage.progress or prepared_run.paths.metrics),
        done_marker=str(stage.done_marker),
    )
    gpus_of_node = recipe.cluster.slurm.gpus_per_node  # a job's own number may be lower
    takes_all_gpus = compute_resources(spec, options).gpus_per_node == gpus_of_node
    return prepared_run.build_launch_file(
        spec,
        recipe,
        network.build_environment_variables(),
        has_own_nodes=takes_all_gpus or options.sbatch.get("exclusive") is True,
        slurm=info,
    )


def build_afterok_dependency(job_ids: Sequence[str]) -> str:
    return f"afterok:{':'.join(job_ids)}" if job_ids else ""


def _find_time_limit_problems(recipe: Recipe, requests: Iterable[JobRequest]) -> list[Problem]:
    min_s = MIN_JOB_START_UP_S + recipe.cluster.stop_grace_s + REQUEUE_MARGIN_S
    return [
        Problem(
            f"the time limit of job {request.job} is {request.shape.time_limit_minutes} min; its "
            f"start, last checkpoint and requeue take at least {min_s / 60:.1f} min",
            "cluster.slurm.time_limit_minutes",
            "give it a longer limit: a run resumes at each, so hours are better than minutes",
        )
        for request in requests
        if request.shape.time_limit_minutes * 60 <= min_s
    ]


def format_dry_run(paths: RunPaths, requests: Sequence[JobRequest]) -> str:
    """Format every job's script, the files that would be written, and the maximum cost."""
    parts = []
    for request in requests:
        script = paths.job(request.job).script
        parts.append(f"==> {script} ({request.shape}) <==\n{render_script(request)}")
    return "\n".join([*parts, _describe_written_files(paths), _describe_max_cost(requests)])


def _describe_written_files(paths: RunPaths) -> str:
    contents = (
        (paths.recipe, "the resolved recipe"),
        (paths.provenance, "versions and this command line"),
        (paths.data_dir, "task sets, and the model if it is made for the run"),
        (paths.submissions, "the number of every job"),
        (paths.jobs_dir, "a folder a job: the script above, launch.json, submitit's files"),
        (paths.logs_dir, "a folder an attempt"),
    )
    lines = [f"  {path}  {content}" for path, content in contents]
    return "\n".join(["==> files that would be written <==", *lines, ""])


def _describe_max_cost(requests: Sequence[JobRequest]) -> str:
    shapes = [request.shape for request in requests if request.job != CARETAKER_JOB]
    nodes = sum(shape.nodes for shape in shapes)
    gpus = sum(shape.nodes * shape.gpus_per_node for shape in shapes)
    gpu_hours = sum(shape.gpu_hours for shape in shapes)
    node_hours = sum(shape.node_hours for shape in shapes)
    return (
        f"==> maximum cost, if all jobs run to their time limit <==\n"
        f"  {len(shapes)} jobs, {nodes} nodes, {gpus} GPUs: "
        f"{gpu_hours:.1f} GPU-hours, {node_hours:.1f} node-hours\n"
        f"  jobs end with the run; a requeue after a time limit may cost as much again\n"
    )
