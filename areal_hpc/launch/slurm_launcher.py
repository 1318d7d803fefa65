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
from areal_hpc.launch.slurm_requests import (
    build_afterok_dependency,
    build_caretaker_launch_file,
    build_caretaker_request,
    build_remaining_job_requests,
    build_requests_of_stage,
    build_run_context,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import CARETAKER_JOB, LaunchFile, Submission, record_submission
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, EventLog
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.batch_script.script import JobRequest
from areal_hpc.slurm.states import JobPhase
from areal_hpc.slurm.submit import (
    raise_if_federated,
    reset_job_and_write_files,
    submit_held_job,
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
        joins_live_jobs=joins_live_jobs,
        plan=plan,
        submits=True,
    ) as ready:
        submission = _RunSubmission(recipe, ready, print_line)
        with cancel_jobs_on_failure(print_line, submission.new_ids):
            dependency = build_afterok_dependency(after)
            for number, stage in enumerate(ready.remaining_stages):
                for request, launch in build_requests_of_stage(stage, recipe, ready):
                    if dependency:
                        request = request.with_dependency(
                            dependency, stays_if_never_met=number == 0
                        )
                    submission.submit_missing_job(request, launch)
                dependency = build_afterok_dependency([submission.ids[stage.leader.name]])
            submission.lay_caretaker()
        held = [
            job.submission.job_id
            for job in ready.live_jobs
            if job.is_held and job.submission.job_id in submission.ids.values()
        ]
        fault_point("submit.before_release")
        release_submitted_jobs([*held, *submission.to_release], ready.paths)


class _RunSubmission:
    def __init__(
        self, recipe: Recipe, prepared_run: PreparedRun, print_line: Callable[[str], None]
    ) -> None:
        self._recipe = recipe
        self._prepared_run = prepared_run
        self._print_line = print_line
        self.ids = _adopt_live_jobs(prepared_run, print_line)
        """Number of each job that is there."""
        self.new_ids: list[str] = []
        """Numbers of the jobs that were submitted."""
        self.to_release: list[str] = []

    def submit_missing_job(self, request: JobRequest, launch: LaunchFile) -> None:
        if request.job in self.ids:
            return
        with record_if_submission_is_refused(request.job, self._prepared_run.paths):
            self._submit(request, launch)

    def _submit(self, request: JobRequest, launch: LaunchFile) -> None:
        job_id, token = submit_held_job(request, launch, run_task, self._print_line)
        self.new_ids.append(job_id)
        record_job_submission(self._prepared_run, request.job, job_id, token)
        self.ids[request.job] = job_id
        self.to_release += [] if request.stays_held else [job_id]
        self._print_line(f"job      {request.job:<10} {job_id:<9} {request.shape}")

    def lay_caretaker(self) -> None:
        """Have a caretaker wait behind the jobs. One that is refused keeps no run from starting."""
        ready = self._prepared_run
        stages = ready.remaining_stages
        names = [job.name for stage in stages for job in stage.jobs]
        context = build_run_context(self._recipe, ready.paths, ready.pythons, Path.cwd())
        request = build_caretaker_request(
            self._recipe,
            context,
            {name: self.ids[name] for name in names},
            stages[-1].leader.name,
        )
        launch = build_caretaker_launch_file(request, self._recipe, ready)
        try:
            if (own_id := self.ids.get(CARETAKER_JOB)) is None:
                self._submit(request, launch)
                return
            reset_job_and_write_files(request, launch, run_task)
            live = {job.slurm_record.job_id: job.slurm_record.state for job in ready.live_jobs}
            # One that runs waits for this launcher, and then lays the next one.
            if live[own_id].phase is JobPhase.WAITING:
                dependency = str(request.parameters["dependency"])
                scontrol.update_waiting_job(own_id, "Dependency", dependency)
        except (RecipeError, ClusterError) as error:
            self._print_line(
                "note     no caretaker waits behind the jobs, so that nobody brings them back when "
                f"all end at once: {error.problems[0].message}"
            )


def _adopt_live_jobs(
    prepared_run: PreparedRun, print_line: Callable[[str], None]
) -> dict[str, str]:
    """Put on record what waits or runs already: number of each job. A second one is cancelled."""
    kept: dict[str, str] = {}
    for job in prepared_run.live_jobs:  # those on record come first, and the newest of them counts
        name, job_id = job.submission.job, job.submission.job_id
        if not job.is_recorded and name in kept:
            print_line(f"cancel   {name:<10} {job_id:<9} a second one, which was not on record")
            if (error := try_to_cancel_jobs([job_id])) is not None:
                raise error
            continue
        if not job.is_recorded:
            record_job_submission(prepared_run, name, job_id, job.submission.token)
        state = "held, will be released" if job.is_held else job.slurm_record.state.meaning
        print_line(f"kept     {name:<10} {job_id:<9} {state}")
        kept[name] = job_id
    return kept


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


def record_job_submission(prepared_run: PreparedRun, job: str, job_id: str, token: str) -> None:
    """Write down that a job was submitted."""
    paths = prepared_run.paths
    submission = Submission(
        job=job,
        job_id=job_id,
        attempt=prepared_run.attempt,
        submitted_at=time.time(),
        script=str(paths.job(job).script),
        token=token,
    )
    record_submission(paths.submissions, submission)
    EventLog(paths.events, "launcher").record("job_submitted", job=job, job_id=job_id)
