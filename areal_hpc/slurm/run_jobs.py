"""Jobs of a run as Slurm has them, whether the run directory records them or not; their end.

Slurm is right about what exists: a submission that was killed, or whose answer was lost, leaves
jobs that no file names. Their comment names the run directory. They are cancelled by a signal, a
grace period, and scancel.
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
    """A job of a run that waits or runs."""

    submission: Submission
    slurm_record: SlurmJobRecord
    is_recorded: bool

    @property
    def is_held(self) -> bool:
        is_waiting = self.slurm_record.state.phase is JobPhase.WAITING
        return is_waiting and is_held_by_user(self.slurm_record.reason)


def is_job_of_run(paths: RunPaths, job: SlurmJobRecord) -> bool:
    """True unless the name or the comment of a job that a run records says that it is another's.

    Slurm counts ids anew when it runs out of them, or is set up again; and a copy of a run's folder
    records the jobs of that run.
    """
    if not job.names:
        return True
    return paths.root.parent.name in job.names and _find_run_of_job(paths, job) is None


def find_original(paths: RunPaths) -> Path | None:
    """The run of which this folder is a copy, if jobs of that run wait or run."""
    if not (ids := list_recorded_job_ids(paths)):
        return None
    return find_run_of_jobs(paths, query_squeue(ids))


def find_run_of_jobs(paths: RunPaths, jobs: Iterable[SlurmJobRecord]) -> Path | None:
    found = (_find_run_of_job(paths, job) for job in jobs if is_live_state(job.state))
    return next((run for run in found if run is not None), None)


def _find_run_of_job(paths: RunPaths, job: SlurmJobRecord) -> Path | None:
    """Another run that is there and that the job's comment begins with.

    One that is not there was moved to this place.
    """
    if not job.comment or f"{job.comment} ".startswith(f"{paths.root} "):
        return None
    words = job.comment.split(" ")
    places = (Path(" ".join(words[:count])) for count in range(len(words), 0, -1))
    try:
        run = next((place for place in places if (place / RECIPE_FILE).exists()), None)
        if run is None or run.samefile(paths.root):  # it has another name, as by a link
            return None
    except OSError:  # of another user, or of storage that is away: nobody knows
        return None
    return run


def list_recorded_job_ids(paths: RunPaths) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.job_id for one in read_submissions(paths.submissions)))


def was_submission_refused_recently(paths: RunPaths) -> bool:
    events = read_recent_events(paths.events)
    return any(row["event"] == SUBMISSION_REFUSED_EVENT for row in events)


def list_unrecorded_live_jobs(
    paths: RunPaths, queued_jobs: Sequence[SlurmJobRecord] | None = None
) -> list[LiveJob]:
    """Jobs that wait or run, name this run in their comment, and are not on record.

    `queued_jobs` are the jobs of the run's owner; Slurm is asked unless they are given.
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
    """All jobs of a run that wait or run: those on record first, oldest first."""
    recorded = {one.job_id: one for one in read_submissions(paths.submissions)}
    found = {job.job_id: job for job in query_squeue(sorted(recorded)) if is_live_state(job.state)}
    live = [
        LiveJob(submission, found[job_id], is_recorded=True)
        for job_id, submission in recorded.items()
        if job_id in found and is_job_of_run(paths, found[job_id])
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
    """True unless Slurm did it, as accounting says, or an administrator for another user.

    Of what Slurm cancels by itself accounting names no user.
    """
    if not job.state.is_cancelled or job.reason == INVALID_DEPENDENCY_REASON:
        return False
    past = queue.read_accounting([job.job_id])
    if not past or not past[-1].state.is_cancelled:
        return True  # nobody knows, or not yet
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
        log.info("Slurm was not asked which user it runs as: %s", error)
        return None


POLL_S = 2.0
"""Between two questions to Slurm; each is one for all jobs."""
KILL_TIMEOUT_S = 120.0
"""From scancel until Slurm must have cleaned up: KillWait, and nodes slow to answer."""
MAX_SLURM_OUTAGE_S = 600.0


def cancel_jobs(
    list_job_ids: Callable[[], Sequence[str]],
    *,
    is_own: Callable[[SlurmJobRecord], bool],
    grace_s: float,
    print_line: Callable[[str], None],
) -> int:
    """Cancel every job, and return when Slurm has none of them left: how many there were.

    A job that waits is cancelled at once. One that runs gets SIGTERM in all its tasks and `grace_s`
    to end by itself; with a grace of 0 it is cancelled at once, too. Whatever ends in the queue
    again, or was submitted meanwhile, is cancelled when it is seen: `list_job_ids` is asked at each
    look for every id that was ever given out. Those that are not the run's (`is_own`) stay.

    If it ends otherwise, an interruption included, `print_line` is told which jobs may be left.
    """
    cancellation = _Cancellation(list_job_ids, is_own, grace_s, print_line)
    try:
        cancellation.run()
    except BaseException:  # boundary: whoever gives up has to know what is left
        if cancellation.left is None:
            print_line("Slurm has not said which jobs are there")
        else:
            left = ", ".join(cancellation.left) or "none"
            print_line(f"jobs that were there when Slurm was last asked: {left}")
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
    """When the grace began, moved on by the time in which Slurm did not answer."""
    seen: set[str] = field(default_factory=set)
    """Every job that was there at some look."""
    left: list[str] | None = None
    """Jobs that were there at the last look; None before the first."""

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
        """Cancel what has to be cancelled now; True once no job is left."""
        ids = self._job_ids()
        snapshot = self._queue.poll(ids).filter_jobs(ids, self._is_own)
        if snapshot.outage:
            raise SlurmTimeoutError(snapshot.outage)
        phases = {
            key: job.state.phase for key, job in snapshot.jobs.items() if is_live_state(job.state)
        }
        self.left = sorted(phases)
        if not phases and self._job_ids() == ids:  # the last one may have submitted another
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
    """Call scancel. Jobs that ended a moment ago are no error.

    With `--signal` it reaches the steps, and not the batch script, which would end the job before
    the tasks have had their grace.
    """
    for ids in build_comma_lists(job_ids):
        try:
            run_slurm_command("scancel", *options, *ids.split(","))
        except SlurmCommandError as error:
            said = str(error).lower()
            if "already completing" not in said and "invalid job id" not in said:
                raise
