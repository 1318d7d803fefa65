"""Slurm launcher: submit all jobs of a run; no process stays on the login node.

Unlike the foreground launcher nobody stays behind: jobs start each other again and end by
themselves. Who waits only watches files, and the queue now and then.
"""

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from areal_hpc.errors import (
    ClusterError,
    JobFailedError,
    Problem,
    RecipeError,
    RunInterruptedError,
    SlurmTimeoutError,
)
from areal_hpc.jobs.caretaker import CaretakerConfig
from areal_hpc.jobs.environment import build_role_variables, get_interpreters
from areal_hpc.jobs.restart_policy import find_crash_error
from areal_hpc.jobs.supervisor import run_task
from areal_hpc.launch.local_launcher import ProgressReporter
from areal_hpc.launch.plan import MAX_SERVICE_RESTARTS, JobStage, plan_run
from areal_hpc.launch.prepared_run import PlanStages, PreparedRun, lock_prepared_run
from areal_hpc.launch.resources.host_memory import (
    find_host_memory_problems,
    find_memory_bytes_of_job_nodes,
)
from areal_hpc.launch.resources.node_shares import add_cpu_and_memory_options
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import (
    REQUEUE_MARGIN_S,
    JobSpec,
    LaunchFile,
    SlurmLaunchInfo,
    Submission,
    get_array_index,
    get_latest_submissions,
    list_excluded_nodes,
    list_held_jobs,
    list_successors,
    read_array_memberships,
    read_submissions,
    read_task_exits,
    record_submission,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.privacy import UMASKS
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, EventLog
from areal_hpc.slurm.batch_script.script import JobRequest, RunContext, build_job_requests
from areal_hpc.slurm.batch_script.successors import build_chain_dependency, name_unknown_job_ids
from areal_hpc.slurm.queue import find_live_job_ids
from areal_hpc.slurm.run_jobs import LiveJob
from areal_hpc.slurm.submission import cancel_held_jobs, release_jobs
from areal_hpc.slurm.submit import (
    SubmittedJob,
    submit_held_successor,
    submit_slurm,
    write_job_files,
    write_member_payload,
)
from areal_hpc.wire.fault_points import fault_point

RUN_FILES_POLL_S = 0.5
"""Between two looks at the run's files."""
FIRST_QUEUE_POLL_S = 15.0
"""Between two questions to slurmctld, at first."""
MAX_QUEUE_POLL_S = 60.0
MIN_JOB_START_UP_S = 60.0
"""A start of a job takes longer: SGLang and Megatron are imported, and a model is loaded."""
JOBS_END_TIMEOUT_S = 120.0
"""Time that jobs get to end after the run's last step."""


def submit(
    recipe: Recipe,
    *,
    say: Callable[[str], None],
    after: Sequence[str] = (),
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    joins_live_jobs: bool = False,
    plan: PlanStages | None = None,
) -> None:
    """Submit what is left of a run. All of its jobs are queued, or none.

    `plan` makes its jobs: `plan_run` unless another is given. They are submitted held, and released
    when all of them are recorded. With `joins_live_jobs` those that wait or run already stay,
    recorded and released, and only the others are submitted.

    Raises:
        RecipeError: Something the recipe names is missing or wrong, or Slurm refuses a job.
        ClusterError: There is no Slurm here, it does not answer, or jobs of the run wait or run.
    """
    # What does not fit is refused before anything is written.
    build_requests_of_run(recipe, Path.cwd(), plan=plan)
    with lock_prepared_run(
        recipe,
        say=say,
        fresh=fresh,
        sys_path=sys_path,
        known_problems=(
            find_host_memory_problems(recipe, find_memory_bytes_of_job_nodes(recipe))
            if plan is None
            else ()
        ),
        joins_live_jobs=joins_live_jobs,
        plan=plan,
    ) as ready:
        submission = _RunSubmission(ready, say)
        with cancel_jobs_on_failure(say, submission.job_ids):
            dependency = build_dependency(after)
            for stage in ready.stages:
                for request, launch in _build_stage_requests(stage, recipe, ready):
                    asked = request.with_dependency(dependency) if dependency else request
                    submission.submit(asked, launch)
                dependency = build_chain_dependency(submission.chains[stage.leader.name])
        # A job that gave its nodes back is released by the trainer, when there is work.
        idle = {job.root.name for job in list_held_jobs(ready.paths.jobs_dir)}
        held = [
            job.submission.job_id
            for job in ready.live_jobs
            if job.is_held
            and job.submission.job not in idle
            and job.submission.job_id in submission.chains[job.submission.job]
        ]
        fault_point("submit.before_release")
        release_submitted_jobs([*held, *submission.to_release], ready.paths)


class _RunSubmission:
    """Submission of what is missing of a run. Jobs that wait or run already are put on record."""

    def __init__(self, ready: PreparedRun, say: Callable[[str], None]) -> None:
        self._ready = ready
        self._say = say
        self.chains = _record_live_jobs_and_cancel_duplicates(ready, say)
        """Each job, first the number of the job itself, then those of its successors."""
        self.job_ids: list[str] = []
        """Numbers of the jobs that were submitted."""
        self.to_release: list[str] = []

    def submit(self, request: JobRequest, launch: LaunchFile) -> None:
        """Submit a job, if there is none, and the successors that it has too few of."""
        chain = self.chains.setdefault(request.job, [])
        with record_submission_refusal(request.job, self._ready.paths):
            if not chain:
                submitted = submit_slurm(request, launch, run_task, self._say)
                self._record(request, submitted)
                self._say(f"job      {request.job:<10} {submitted.job_id:<9} {request.shape}")
            self._submit_successors(request, launch.paths.script)

    def _submit_successors(self, request: JobRequest, script: Path) -> None:
        chain = self.chains[request.job]
        laid = list_successors(read_submissions(self._ready.paths.submissions), request.job)
        place = max((one.successor for one in laid), default=0)
        before = len(chain)
        while len(chain) <= request.successors:
            place += 1
            self._record(
                request, submit_held_successor(request, script, tuple(chain), place, self._say)
            )
        if len(chain) > before:
            numbers = ", ".join(chain[before:])
            self._say(f"         {request.job:<10} {numbers}: each starts if those before it fail")

    def _record(self, request: JobRequest, submitted: SubmittedJob) -> None:
        self.job_ids.append(submitted.job_id)
        record_job_submission(self._ready, request.job, submitted)
        self.chains[request.job].append(submitted.job_id)
        self.to_release += [] if request.stays_held else [submitted.job_id]


def _record_live_jobs_and_cancel_duplicates(
    ready: PreparedRun, say: Callable[[str], None]
) -> dict[str, list[str]]:
    """Put on record what waits or runs already: number of each job, behind it its successors'.

    A second job of a name is cancelled. One of which only successors are left is the first of them.
    """
    kept: dict[str, str] = {}
    successors: dict[str, list[LiveJob]] = {}
    for job in ready.live_jobs:  # those on record come first, and the newest of them counts
        name, job_id = job.submission.job, job.submission.job_id
        place = job.submission.successor
        if not job.is_recorded and name in kept and not place:
            say(f"cancel   {name:<10} {job_id:<9} a second one, which was not on record")
            if (error := cancel_held_jobs([job_id])) is not None:
                raise error
            continue
        if not job.is_recorded:
            _write_payload_of_array_member(ready.paths, job)
            submitted = SubmittedJob(job_id, job.submission.token, place)
            record_job_submission(ready, name, submitted)
        state = "held, will be released" if job.is_held else job.queued.state.meaning
        say(f"kept     {name:<10} {job_id:<9} {f'successor {place}, ' if place else ''}{state}")
        if place:
            successors.setdefault(name, []).append(job)
        else:
            kept[name] = job_id
    for name in successors.keys() - kept.keys():  # it starts whatever ended the job before it
        first = successors[name].pop(0).submission
        record_job_submission(ready, name, SubmittedJob(first.job_id, first.token))
        kept[name] = first.job_id
    return {
        name: [job_id, *(job.submission.job_id for job in successors.get(name, ()))]
        for name, job_id in kept.items()
    }


def _write_payload_of_array_member(paths: RunPaths, job: LiveJob) -> None:
    """Write what the member of a sweep's array starts: its submission was killed before that."""
    name, job_id = job.submission.job, job.submission.job_id
    if not get_array_index(job_id):
        return
    sweep = RunPaths(Path(read_array_memberships(paths)[name].sweep_dir))
    write_member_payload(sweep.job(name).submitit_dir, job_id, paths.job(name), run_task)


def prepare_run_and_write_scripts(
    recipe: Recipe, *, say: Callable[[str], None], fresh: bool = False
) -> list[Path]:
    """Put what is left of a run in place, and submit nothing; the scripts of its jobs.

    Raises:
        RecipeError: Something the recipe names is missing or wrong.
        ClusterError: Jobs of the run wait or run.
    """
    build_requests_of_run(recipe, Path.cwd())
    with lock_prepared_run(recipe, say=say, fresh=fresh) as ready:
        return [
            write_job_files(request, launch, run_task).script
            for stage in ready.stages
            for request, launch in _build_stage_requests(stage, recipe, ready)
        ]


@contextlib.contextmanager
def cancel_jobs_on_failure(say: Callable[[str], None], job_ids: Sequence[str]) -> Iterator[None]:
    """Cancel the jobs if the context fails. It adds to their numbers as it submits them."""
    try:
        yield
    except BaseException:  # boundary: half a run would wait for its other half
        if (error := cancel_held_jobs(job_ids)) is not None:
            say(f"jobs {', '.join(job_ids)} stay in the queue, held: {error.problems[0].message}")
        raise


@contextlib.contextmanager
def record_submission_refusal(job: str, *runs: RunPaths) -> Iterator[None]:
    """Note in the runs' event logs that Slurm did not take a job, for `areal-hpc why`."""
    try:
        yield
    except (RecipeError, ClusterError) as error:
        problem = error.problems[0]
        for paths in runs:
            EventLog(paths.events, "launcher").record(
                SUBMISSION_REFUSED_EVENT, job=job, reason=problem.message, hint=problem.hint
            )
        raise


def release_submitted_jobs(job_ids: Sequence[str], *runs: RunPaths) -> None:
    """Let jobs start that were submitted held and are all recorded.

    Raises:
        ClusterError: Slurm did not do it; the jobs stay held.
    """
    try:
        release_jobs(job_ids)
    except ClusterError as error:
        commands = "; ".join(f"areal-hpc resume {shlex.quote(str(paths.root))}" for paths in runs)
        raise ClusterError(
            f"all jobs are submitted, and held: {error.problems[0].message}",
            hint=f"when `scontrol ping` succeeds, release them: {commands}",
        ) from error


def _build_stage_requests(
    stage: JobStage, recipe: Recipe, ready: PreparedRun
) -> Iterator[tuple[JobRequest, LaunchFile]]:
    place = build_run_context(recipe, ready.paths, ready.pythons, Path.cwd())
    slurm = add_cpu_and_memory_options(recipe, stage.jobs)
    requests = build_job_requests(stage.jobs, slurm, place)
    for spec, request in zip(stage.jobs, requests, strict=True):
        yield request, build_launch_file(spec, stage, request, recipe, ready)


def record_job_submission(ready: PreparedRun, job: str, submitted: SubmittedJob) -> None:
    """Write down that a job was submitted."""
    paths = ready.paths
    submission = Submission(
        job=job,
        job_id=submitted.job_id,
        attempt=ready.attempt,
        submitted_at=time.time(),
        script=str(paths.job(job).script),
        token=submitted.token,
        successor=submitted.successor,
    )
    record_submission(paths.submissions, submission)
    EventLog(paths.events, "launcher").record(
        "job_submitted", job=job, job_id=submitted.job_id, successor=submitted.successor
    )


def build_launch_file(
    spec: JobSpec, stage: JobStage, request: JobRequest, recipe: Recipe, ready: PreparedRun
) -> LaunchFile:
    """Launch facts for the supervisors of a job under Slurm."""
    cluster, paths = recipe.cluster, ready.paths
    network = cluster.slurm.network
    return LaunchFile(
        job=_add_caretaker(spec, stage, paths),
        job_dir=str(paths.job(spec.name).root),
        log_dir=str(paths.log_dir(ready.attempt)),
        events=str(paths.events),
        pythons=ready.pythons,
        variables=build_role_variables(recipe, network.build_variables()),
        recipe=str(paths.recipe),
        umask=UMASKS[cluster.readable_by],
        stop_grace_s=cluster.stop_grace_s,
        slurm=SlurmLaunchInfo(
            submissions=str(paths.submissions),
            script=str(paths.job(spec.name).script),
            excluded_nodes=str(paths.excluded_nodes),
            excluded_by_recipe=cluster.slurm.get_options(spec.name).exclude or "",
            job_name=request.name,
            comment=request.comment,
            cancelled=str(paths.cancelled_marker),
            interface=network.interface,
            progress=str(stage.progress or paths.metrics),
            done_marker=str(stage.done_marker),
            prerequisite=_find_prerequisite(stage, ready),
            idle_timeout_s=cluster.idle_timeout_s,
        ),
    )


def _find_prerequisite(stage: JobStage, ready: PreparedRun) -> str:
    """The done marker of the stage before, if that is to be run too; else empty."""
    before = ready.stages[: ready.stages.index(stage)]
    return str(before[-1].done_marker) if before else ""


def _add_caretaker(spec: JobSpec, stage: JobStage, paths: RunPaths) -> JobSpec:
    """The job with a process that submits others of its stage again; alone it has no others."""
    if not stage.others:
        return spec
    others = tuple(job.name for job in stage.others)
    config = CaretakerConfig(
        run_dir=paths.root, job=spec.name, leader=stage.leader.name, others=others
    )
    caretaker = config.build_process_spec("caretaker", tasks="first", restarts=MAX_SERVICE_RESTARTS)
    return msgspec.structs.replace(spec, processes=[*spec.processes, caretaker])


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
        excluded_nodes=tuple(sorted(list_excluded_nodes(paths.excluded_nodes))),
    )


def build_requests_of_run(
    recipe: Recipe,
    working_folder: Path,
    after: Sequence[str] = (),
    place: RunContext | None = None,
    plan: PlanStages | None = None,
) -> list[JobRequest]:
    """Requests to Slurm for all that is left of a run; nothing is written.

    Numbers that Slurm has not given out yet are spelt `SFT_JOBID`. The run's own place holds unless
    another is given.

    Raises:
        RecipeError: Jobs do not fit the nodes; every misfit at once.
    """
    paths = RunPaths(recipe.run_dir.resolve())
    place = place or build_run_context(recipe, paths, get_interpreters(recipe), working_folder)
    planned = (plan or plan_run)(recipe, paths, None)
    stages = [one for one in planned if not one.done_marker.exists()]
    jobs = [job for stage in stages for job in stage.jobs]
    slurm = add_cpu_and_memory_options(recipe, jobs)
    requests = {request.job: request for request in build_job_requests(jobs, slurm, place)}
    if problems := _find_short_time_limits(recipe, requests.values()):
        raise RecipeError.from_problems(problems)
    dependency = build_dependency(after)
    for stage in stages:
        for job in stage.jobs if dependency else ():
            requests[job.name] = requests[job.name].with_dependency(dependency)
        leading = name_unknown_job_ids(stage.leader.name, recipe.cluster.slurm.successors)
        dependency = (
            f"aftercorr:{leading[0]}" if place.is_array else build_chain_dependency(leading)
        )
    return list(requests.values())


def build_dependency(job_ids: Sequence[str]) -> str:
    """Slurm's way to say that jobs must have succeeded; empty for none."""
    return f"afterok:{':'.join(job_ids)}" if job_ids else ""


def _find_short_time_limits(recipe: Recipe, requests: Iterable[JobRequest]) -> list[Problem]:
    """Time limits that leave no time between a job's start and the stop before its end."""
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


def watch_submitted_run(
    recipe: Recipe,
    paths: RunPaths,
    reporter: ProgressReporter,
    stop: threading.Event,
    plan: PlanStages | None = None,
) -> None:
    """Show a submitted run's progress until it has ended and its jobs are gone.

    Raises:
        JobFailedError: The leading job is gone for good, and the run is not finished.
        RunInterruptedError: `stop` was set. The jobs go on.
    """
    poll_s, asked_at, was_gone = FIRST_QUEUE_POLL_S, time.monotonic(), False
    while not paths.finished_marker.exists():
        planned = (plan or plan_run)(recipe, paths, None)
        left = (one for one in planned if not one.done_marker.exists())
        if (stage := next(left, None)) is None:
            break  # it has just finished
        reporter.show_progress(stage.name)
        if stop.wait(RUN_FILES_POLL_S):
            raise RunInterruptedError
        if time.monotonic() - asked_at < poll_s:
            continue
        is_gone = _is_job_gone(paths, stage.leader.name)
        if is_gone and was_gone and not paths.finished_marker.exists():
            raise _build_gone_job_error(paths, stage.leader.name)
        # Asked again soon: a job may be submitting itself anew at this moment.
        poll_s = FIRST_QUEUE_POLL_S if is_gone else min(poll_s * 1.5, MAX_QUEUE_POLL_S)
        asked_at, was_gone = time.monotonic(), is_gone
    reporter.show_progress("train")
    _wait_for_jobs_to_end_or_report_them(paths, reporter, stop)


def _is_job_gone(paths: RunPaths, job: str) -> bool:
    """True if Slurm no longer has the newest submission of a job, nor a successor of it."""
    submissions = read_submissions(paths.submissions)
    chain = [get_latest_submissions(submissions)[job], *list_successors(submissions, job)]
    try:
        return not find_live_job_ids([one.job_id for one in chain])
    except ClusterError:
        return False  # slurmctld may be away for a while


def _build_gone_job_error(paths: RunPaths, leader: str) -> JobFailedError:
    for job in (leader, *get_latest_submissions(read_submissions(paths.submissions))):
        if (
            crash := find_crash_error(job, list(read_task_exits(paths.job(job)).values()))
        ) is not None:
            return crash
    return JobFailedError(
        f"job {leader} disappeared before its work was done",
        key=str(paths.job(leader).submitit_dir),
        hint="read the files in that directory; submit again to resume",
        code=ClusterError.exit_code,
    )


def _wait_for_jobs_to_end_or_report_them(
    paths: RunPaths, reporter: ProgressReporter, stop: threading.Event
) -> None:
    live = [
        one.job_id for one in get_latest_submissions(read_submissions(paths.submissions)).values()
    ]
    give_up_at = time.monotonic() + JOBS_END_TIMEOUT_S
    while live:
        with contextlib.suppress(SlurmTimeoutError):  # the run itself is finished by now
            live = find_live_job_ids(live)
        if live and (time.monotonic() > give_up_at or stop.wait(2.0)):
            reporter.print_line(f"the run is finished; jobs are still ending: {', '.join(live)}")
            return
