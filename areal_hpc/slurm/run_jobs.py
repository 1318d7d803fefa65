"""Jobs of a run in Slurm, recorded in the run directory or not, and their cancellation.

Slurm is the authority on which jobs exist: a submission that was killed, or whose answer was lost,
leaves jobs that no file names. Their comment names the run directory. Cancelled jobs get a signal,
a grace period, and scancel.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmTimeoutError
from areal_hpc.rundir.jobs import Submission, read_submissions
from areal_hpc.rundir.paths import RECIPE_FILE, RunPaths
from areal_hpc.rundir.telemetry.events import SUBMISSION_REFUSED_EVENT, read_recent_events
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.commands import build_comma_lists, run_slurm_command
from areal_hpc.slurm.queue import (
    SLURM_OUTAGE_BACKOFF,
    QueuePoller,
    SlurmJobRecord,
    is_live_state,
    query_squeue,
    query_squeue_of_user,
)
from areal_hpc.slurm.states import INVALID_DEPENDENCY_REASON, JobPhase, is_held_by_user

log = logging.getLogger(__name__)

_TOKEN_PATTERN = re.compile(r"\.([0-9a-f]{8})$")


@dataclass(frozen=True, slots=True)
class LiveJob:
    """Job of a run that waits or runs."""

    submission: Submission
    slurm_record: SlurmJobRecord
    is_recorded: bool

    @property
    def is_held(self) -> bool:
        is_waiting = self.slurm_record.state.phase is JobPhase.WAITING
        return is_waiting and is_held_by_user(self.slurm_record.reason)


def is_job_of_run(paths: RunPaths, job: SlurmJobRecord) -> bool:
    """Return whether a recorded job belongs to the run, by its name and comment.

    Slurm reuses ids when it runs out of them or is set up again, and a copy of a run's folder
    records the original's jobs.
    """
    if not job.names:
        return True
    return paths.root.parent.name in job.names and _find_run_of_job(paths, job) is None


def find_original(paths: RunPaths) -> Path | None:
    """Find the run of which this folder is a copy, if jobs of that run wait or run."""
    if not (ids := list_recorded_job_ids(paths)):
        return None
    return find_run_of_jobs(paths, query_squeue(ids))


def find_run_of_jobs(paths: RunPaths, jobs: Iterable[SlurmJobRecord]) -> Path | None:
    runs = (_find_run_of_job(paths, job) for job in jobs if is_live_state(job.state))
    return next((run for run in runs if run is not None), None)


def _find_run_of_job(paths: RunPaths, job: SlurmJobRecord) -> Path | None:
    """Find another existing run whose path begins the job's comment.

    A run that no longer exists at that path was moved here.
    """
    if not job.comment or f"{job.comment} ".startswith(f"{paths.root} "):
        return None
    words = job.comment.split(" ")
    folders = (Path(" ".join(words[:count])) for count in range(len(words), 0, -1))
    try:
        run = next((folder for folder in folders if (folder / RECIPE_FILE).exists()), None)
        if run is None or run.samefile(paths.root):  # this run under another name, as by a link
            return None
    except OSError:  # a folder of another user, or an outage of the storage
        return None
    return run


def list_recorded_job_ids(paths: RunPaths) -> tuple[str, ...]:
    submissions = read_submissions(paths.submissions)
    return tuple(dict.fromkeys(submission.job_id for submission in submissions))


def was_submission_refused_recently(paths: RunPaths) -> bool:
    events = read_recent_events(paths.events)
    return any(row["event"] == SUBMISSION_REFUSED_EVENT for row in events)


def list_unrecorded_live_jobs(
    paths: RunPaths, queued_jobs: Sequence[SlurmJobRecord] | None = None
) -> list[LiveJob]:
    """List jobs that wait or run, name this run in their comment, and are not recorded.

    `queued_jobs` are the jobs of the run's owner; without them Slurm is queried.
    """
    if not paths.root.exists():
        return []
    recorded = set(list_recorded_job_ids(paths))
    jobs = query_squeue_of_user(paths.root.stat().st_uid) if queued_jobs is None else queued_jobs
    return [
        LiveJob(submission, job, is_recorded=False)
        for job in jobs
        if job.job_id not in recorded
        and is_live_state(job.state)
        and (submission := _build_submission_record(paths, job)) is not None
    ]


def list_live_jobs(paths: RunPaths) -> list[LiveJob]:
    """List all jobs of a run that wait or run: the recorded ones first, oldest first."""
    recorded = {each.job_id: each for each in read_submissions(paths.submissions)}
    queued = {job.job_id: job for job in query_squeue(sorted(recorded)) if is_live_state(job.state)}
    live = [
        LiveJob(submission, queued[job_id], is_recorded=True)
        for job_id, submission in recorded.items()
        if job_id in queued and is_job_of_run(paths, queued[job_id])
    ]
    return [*live, *list_unrecorded_live_jobs(paths)]


def _build_submission_record(paths: RunPaths, job: SlurmJobRecord) -> Submission | None:
    if not f"{job.comment} ".startswith(f"{paths.root} "):
        return None
    token = _TOKEN_PATTERN.search(job.name)
    full_name = _TOKEN_PATTERN.sub("", job.name)
    name = full_name.removeprefix(f"{paths.queue_name}-")
    return Submission(
        job=name,
        job_id=job.job_id,
        attempt=max(paths.list_attempts(), default=1),
        submitted_at=0.0,
        script=str(paths.job(name).script) if re.fullmatch(r"[\w.-]+", name) else "",
        token=token[1] if token else "",
    )


def was_cancelled_by_person(job: SlurmJobRecord, queue: QueuePoller, owner_id: int) -> bool:
    """Return whether a person cancelled a job for its owner, as far as accounting records it.

    It was no person if Slurm did it, for which accounting names no user, or if root or Slurm's own
    user did it for somebody else.
    """
    if not job.state.is_cancelled or job.reason == INVALID_DEPENDENCY_REASON:
        return False
    past = queue.read_accounting([job.job_id])
    if not past or not past[-1].state.is_cancelled:
        return True  # accounting does not record it, or not yet
    user_id = past[-1].cancelled_by
    if user_id is None:
        return False
    if user_id == owner_id:
        return True
    return user_id != 0 and user_id != _find_slurm_user_id()


def _find_slurm_user_id() -> int | None:
    try:
        return scontrol.read_slurm_user_id()
    except ClusterError as error:
        log.info("Slurm's own user is unknown: %s", error)
        return None


POLL_S = 2.0
"""Time between two calls of squeue, each for all jobs."""
KILL_TIMEOUT_S = 120.0
"""Time between scancel and the end of Slurm's cleanup: KillWait, and nodes slow to answer."""
MAX_SLURM_OUTAGE_S = 600.0


def cancel_jobs(
    list_job_ids: Callable[[], Sequence[str]],
    *,
    is_own: Callable[[SlurmJobRecord], bool],
    grace_s: float,
    print_line: Callable[[str], None],
) -> int:
    """Cancel every job, wait until Slurm has none of them left, and return their number.

    A job that waits is cancelled at once. A job that runs gets SIGTERM in all its tasks and
    `grace_s` to end by itself; with a grace of 0 it is cancelled at once, too. Each look lists the
    ids of all submissions (`list_job_ids`), so that jobs that were requeued or submitted meanwhile
    are cancelled as well. Jobs that are not the run's (`is_own`) stay.

    After an error or an interruption `print_line` gets the jobs that may be left.
    """
    cancellation = _Cancellation(list_job_ids, is_own, grace_s, print_line)
    try:
        cancellation.run()
    except BaseException:  # boundary: the caller has to know what is left
        if cancellation.left is None:
            print_line("Slurm has not listed the jobs yet")
        else:
            left = ", ".join(cancellation.left) or "none"
            print_line(f"jobs that Slurm listed last: {left}")
        raise
    return len(cancellation.seen)


@dataclass(slots=True)
class _Cancellation:
    _job_ids: Callable[[], Sequence[str]]
    _is_own: Callable[[SlurmJobRecord], bool]
    _grace_s: float
    _print_line: Callable[[str], None]
    _queue: QueuePoller = field(default_factory=QueuePoller)
    _signaled: set[str] = field(default_factory=set)
    _began_at: float = field(default_factory=lambda: time.monotonic())
    """Begin of the grace, moved by the time in which Slurm did not answer."""
    seen: set[str] = field(default_factory=set)
    """Every job that some look listed."""
    left: list[str] | None = None
    """Jobs that the last look listed; None before the first."""

    def run(self) -> None:
        silent_since: float | None = None
        silent_looks = 0
        while True:
            look_began_at = time.monotonic()
            try:
                if self._cancel_what_is_left():
                    return
                silent_since, silent_looks = None, 0
                time.sleep(POLL_S)
            except SlurmTimeoutError as silence:
                silent_since = silent_since or look_began_at
                self._wait_out_outage(
                    silence, silent_since, SLURM_OUTAGE_BACKOFF.get_pause_s(silent_looks)
                )
                silent_looks += 1
                self._began_at += time.monotonic() - look_began_at

    def _cancel_what_is_left(self) -> bool:
        """Cancel jobs that are due now; return whether no job is left."""
        ids = self._job_ids()
        snapshot = self._queue.poll(ids).filter_jobs(ids, self._is_own)
        if snapshot.outage:
            raise SlurmTimeoutError(snapshot.outage)
        phases = {
            key: job.state.phase for key, job in snapshot.jobs.items() if is_live_state(job.state)
        }
        self.left = sorted(phases)
        if not phases and self._job_ids() == ids:  # the last job may have submitted another
            return True
        self.seen |= phases.keys()
        waited_s = time.monotonic() - self._began_at
        if phases and waited_s > self._grace_s + KILL_TIMEOUT_S:
            raise ClusterError(
                f"{len(phases)} jobs are still running after {waited_s:.0f} s: "
                f"{', '.join(self.left)}",
                hint=f"scancel {' '.join(self.left)}; a node that does not answer keeps a job",
            )
        if waited_s >= self._grace_s:
            _call_scancel([key for key in self.left if phases[key] is not JobPhase.ENDING])
        else:
            _call_scancel([key for key in self.left if phases[key] is JobPhase.WAITING])
            self._signal_once([key for key in self.left if phases[key] is JobPhase.RUNNING])
        return False

    def _signal_once(self, running: Sequence[str]) -> None:
        fresh = [job_id for job_id in running if job_id not in self._signaled]
        if not fresh:
            return
        _call_scancel(fresh, "--signal=TERM")
        self._signaled |= set(fresh)
        waiting = f"waiting {self._grace_s:.0f} s for their checkpoints"
        self._print_line(f"sent SIGTERM to {len(fresh)} jobs; {waiting}")

    def _wait_out_outage(
        self, silence: SlurmTimeoutError, silent_since: float, pause_s: float
    ) -> None:
        outage_s = time.monotonic() - silent_since
        if outage_s > MAX_SLURM_OUTAGE_S:
            raise ClusterError(
                f"Slurm has not responded for {outage_s:.0f} s: {silence.problems[0].message}",
                hint="the run is marked as cancelled; repeat the command when `scontrol ping` "
                "succeeds",
            ) from silence
        self._print_line(
            f"slurmctld has not responded for {outage_s:.0f} s; next try in {pause_s:.0f} s"
        )
        time.sleep(pause_s)


def _call_scancel(job_ids: Sequence[str], *options: str) -> None:
    """Call scancel; pass over jobs that ended a moment ago.

    With `--signal` it reaches the steps and not the batch script, whose end would end the job
    before the tasks' grace is over.
    """
    for ids in build_comma_lists(job_ids):
        try:
            run_slurm_command("scancel", *options, *ids.split(","))
        except SlurmCommandError as error:
            message = str(error).lower()
            if "already completing" not in message and "invalid job id" not in message:
                raise
