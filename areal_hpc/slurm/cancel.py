"""Cancellation of Slurm jobs: signal, wait for the grace period, scancel."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmTimeoutError
from areal_hpc.slurm.commands import build_comma_lists, run_slurm_command
from areal_hpc.slurm.queue import (
    SLURM_OUTAGE_BACKOFF,
    QueuePoller,
    SlurmJobRecord,
    is_live_state,
)
from areal_hpc.slurm.states import JobPhase

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
