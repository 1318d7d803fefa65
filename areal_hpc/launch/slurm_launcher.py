"""Slurm launcher: submit all jobs of a run; no process stays on the login node.

Unlike the foreground launcher nobody stays behind: jobs start each other again and end by
themselves.
"""

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.jobs.supervisor import run_task
from areal_hpc.launch.prepared_run import PreparedRun, StagePlanner, prepare_and_lock_run
from areal_hpc.launch.resources.host_memory import (
    find_host_memory_problems,
    get_node_bytes_by_job,
)
from areal_hpc.launch.slurm_requests import (
    build_afterok_dependency,
    build_remaining_job_requests,
    build_requests_of_stage,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import (
    LaunchFile,
    Submission,
    list_jobs_that_gave_nodes_back,
    list_waiting_successors,
    read_submissions,
    record_submission,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, EventLog
from areal_hpc.slurm.batch_script.script import JobRequest
from areal_hpc.slurm.batch_script.successors import build_dependency_on_job_or_successors
from areal_hpc.slurm.run_jobs import LiveJob
from areal_hpc.slurm.submit import (
    SubmittedJob,
    raise_if_federated,
    reset_job_and_write_files,
    submit_held_job,
    submit_held_successor,
)
from areal_hpc.slurm.submit_exactly_once import release_jobs, try_to_cancel_jobs
from areal_hpc.wire.fault_points import fault_point


def submit(
    recipe: Recipe,
    *,
    print_line: Callable[[str], None],
    after: Sequence[str] = (),
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    joins_live_jobs: bool = False,
    plan: StagePlanner | None = None,
) -> None:
    """Submit what is left of a run. All of its jobs are queued, or none.

    `plan` makes its jobs: `plan_run` unless another is given. They are submitted held, and released
    when all of them are recorded. With `joins_live_jobs` those that wait or run already stay,
    recorded and released, and only the others are submitted.
    """
    # What does not fit is refused before anything is written.
    raise_if_federated()
    build_remaining_job_requests(recipe, Path.cwd(), plan=plan)
    with prepare_and_lock_run(
        recipe,
        print_line=print_line,
        fresh=fresh,
        sys_path=sys_path,
        known_problems=(
            find_host_memory_problems(recipe, get_node_bytes_by_job(recipe)) if plan is None else ()
        ),
        joins_live_jobs=joins_live_jobs,
        plan=plan,
        submits=True,
    ) as ready:
        submission = _RunSubmission(ready, print_line)
        with cancel_jobs_on_failure(print_line, submission.job_ids):
            dependency = build_afterok_dependency(after)
            for stage in ready.remaining_stages:
                for request, launch in build_requests_of_stage(stage, recipe, ready):
                    asked = request.with_dependency(dependency) if dependency else request
                    submission.submit_missing_job_and_successors(asked, launch)
                dependency = build_dependency_on_job_or_successors(
                    submission.chains[stage.leader.name]
                )
        # A job that gave its nodes back is released by the trainer, when there is work.
        idle = {job.root.name for job in list_jobs_that_gave_nodes_back(ready.paths.jobs_dir)}
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
    def __init__(self, prepared_run: PreparedRun, print_line: Callable[[str], None]) -> None:
        self._prepared_run = prepared_run
        self._print_line = print_line
        self.chains = _record_live_jobs_and_cancel_duplicates(prepared_run, print_line)
        """Each job, first the number of the job itself, then those of its successors."""
        self.job_ids: list[str] = []
        """Numbers of the jobs that were submitted."""
        self.to_release: list[str] = []

    def submit_missing_job_and_successors(self, request: JobRequest, launch: LaunchFile) -> None:
        chain = self.chains.setdefault(request.job, [])
        with record_if_submission_is_refused(request.job, self._prepared_run.paths):
            if not chain:
                submitted = submit_held_job(request, launch, run_task, self._print_line)
                self._record_submitted_job(request, submitted)
                self._print_line(
                    f"job      {request.job:<10} {submitted.job_id:<9} {request.shape}"
                )
            self._submit_successors(request, launch.paths.script)

    def _submit_successors(self, request: JobRequest, script: Path) -> None:
        chain = self.chains[request.job]
        laid = list_waiting_successors(
            read_submissions(self._prepared_run.paths.submissions), request.job
        )
        place = max((one.successor for one in laid), default=0)
        before = len(chain)
        while len(chain) <= request.successors:
            place += 1
            self._record_submitted_job(
                request,
                submit_held_successor(request, script, tuple(chain), place, self._print_line),
            )
        if len(chain) > before:
            numbers = ", ".join(chain[before:])
            self._print_line(
                f"         {request.job:<10} {numbers}: each starts if those before it fail"
            )

    def _record_submitted_job(self, request: JobRequest, submitted: SubmittedJob) -> None:
        self.job_ids.append(submitted.job_id)
        record_job_submission(self._prepared_run, request.job, submitted)
        self.chains[request.job].append(submitted.job_id)
        self.to_release += [] if request.stays_held else [submitted.job_id]


def _record_live_jobs_and_cancel_duplicates(
    prepared_run: PreparedRun, print_line: Callable[[str], None]
) -> dict[str, list[str]]:
    """Put on record what waits or runs already: number of each job, behind it its successors'.

    A second job of a name is cancelled. One of which only successors are left is the first of them.
    """
    kept: dict[str, str] = {}
    successors: dict[str, list[LiveJob]] = {}
    for job in prepared_run.live_jobs:  # those on record come first, and the newest of them counts
        name, job_id = job.submission.job, job.submission.job_id
        place = job.submission.successor
        if not job.is_recorded and name in kept and not place:
            print_line(f"cancel   {name:<10} {job_id:<9} a second one, which was not on record")
            if (error := try_to_cancel_jobs([job_id])) is not None:
                raise error
            continue
        if not job.is_recorded:
            submitted = SubmittedJob(job_id, job.submission.token, place)
            record_job_submission(prepared_run, name, submitted)
        state = "held, will be released" if job.is_held else job.slurm_record.state.meaning
        print_line(
            f"kept     {name:<10} {job_id:<9} {f'successor {place}, ' if place else ''}{state}"
        )
        if place:
            successors.setdefault(name, []).append(job)
        else:
            kept[name] = job_id
    for name in successors.keys() - kept.keys():  # it starts whatever ended the job before it
        first = successors[name].pop(0).submission
        record_job_submission(prepared_run, name, SubmittedJob(first.job_id, first.token))
        kept[name] = first.job_id
    return {
        name: [job_id, *(job.submission.job_id for job in successors.get(name, ()))]
        for name, job_id in kept.items()
    }


def prepare_run_and_write_scripts(
    recipe: Recipe, *, print_line: Callable[[str], None], fresh: bool = False
) -> list[Path]:
    """Put what is left of a run in place, and submit nothing; the scripts of its jobs."""
    build_remaining_job_requests(recipe, Path.cwd())
    with prepare_and_lock_run(recipe, print_line=print_line, fresh=fresh) as ready:
        return [
            reset_job_and_write_files(request, launch, run_task).script
            for stage in ready.remaining_stages
            for request, launch in build_requests_of_stage(stage, recipe, ready)
        ]


@contextlib.contextmanager
def cancel_jobs_on_failure(
    print_line: Callable[[str], None], job_ids: Sequence[str]
) -> Iterator[None]:
    """Cancel the jobs if the context fails. It adds to their numbers as it submits them."""
    try:
        yield
    except BaseException:  # boundary: half a run would wait for its other half
        if (error := try_to_cancel_jobs(job_ids)) is not None:
            print_line(
                f"jobs {', '.join(job_ids)} stay in the queue, held: {error.problems[0].message}"
            )
        raise


@contextlib.contextmanager
def record_if_submission_is_refused(job: str, *runs: RunPaths) -> Iterator[None]:
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


def record_job_submission(prepared_run: PreparedRun, job: str, submitted: SubmittedJob) -> None:
    """Write down that a job was submitted."""
    paths = prepared_run.paths
    submission = Submission(
        job=job,
        job_id=submitted.job_id,
        attempt=prepared_run.attempt,
        submitted_at=time.time(),
        script=str(paths.job(job).script),
        token=submitted.token,
        successor=submitted.successor,
    )
    record_submission(paths.submissions, submission)
    EventLog(paths.events, "launcher").record(
        "job_submitted", job=job, job_id=submitted.job_id, successor=submitted.successor
    )
