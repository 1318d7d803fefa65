"""Cancellation of Slurm jobs: signal, wait for the grace period, scancel."""

import time
from collections.abc import Callable, Sequence

from areal_hpc.errors import ClusterError, SlurmCommandError, SlurmTimeoutError
from areal_hpc.slurm.commands import build_comma_lists, run_slurm_command
from areal_hpc.slurm.queue import QueuePoller, QueueSnapshot, is_live_state
from areal_hpc.slurm.states import JobPhase

POLL_S = 2.0
"""Between two questions to Slurm; each is one for all jobs."""
KILL_TIMEOUT_S = 120.0
"""From scancel until Slurm must have cleaned up: KillWait, and nodes slow to answer."""
MAX_SLURM_OUTAGE_S = 600.0


def cancel_jobs_and_wait(
    job_ids: Callable[[], Sequence[str]],
    *,
    label: str,
    grace_s: float,
    say: Callable[[str], None],
) -> int:
    """Cancel every job, and return when Slurm has none of them left: how many there were.

    A job that waits is cancelled at once. One that runs gets SIGTERM in all its tasks and `grace_s`
    to end by itself; with a grace of 0 it is cancelled at once, too. Whatever ends in the queue
    again, or was submitted meanwhile, is cancelled when it is seen: `job_ids` is asked at each look
    for every id that was ever given out. `label` is what the jobs' names or comments hold.

    If it ends otherwise, an interruption included, `say` is told which jobs may be left.

    Raises:
        ClusterError: Slurm was silent, or jobs were left, for too long, or Slurm refused.
    """
    left: list[str] = []
    try:
        return _cancel_until_none_is_left(job_ids, left, label=label, grace_s=grace_s, say=say)
    except BaseException:  # boundary: whoever gives up has to know what is left
        if left:
            say(f"jobs that were there when Slurm was last asked: {', '.join(left)}")
        else:
            say("Slurm has not said which jobs are there")
        raise


def _cancel_until_none_is_left(
    job_ids: Callable[[], Sequence[str]],
    left: list[str],
    *,
    label: str,
    grace_s: float,
    say: Callable[[str], None],
) -> int:
    """The work of `cancel_jobs_and_wait`; `left` gets the jobs that were live at the last look."""
    queue = QueuePoller()
    asked: set[str] = set()
    seen: set[str] = set()
    ids: Sequence[str] = ()
    began = time.monotonic()
    while True:
        try:
            ids = job_ids()
            snapshot = queue.poll(ids).filter_jobs(ids, label)
        except SlurmTimeoutError as silence:
            snapshot = queue.record_outage(silence)
        if snapshot.outage:
            _pause_during_outage(snapshot, queue.pause_s, say)
            began = time.monotonic() if not seen else began + queue.pause_s
            continue
        phases = {
            key: job.state.phase for key, job in snapshot.jobs.items() if is_live_state(job.state)
        }
        alive = sorted(phases)
        left[:] = alive
        if not alive and job_ids() == ids:  # the last one may have submitted another
            return len(seen)
        seen |= set(alive)
        waited_s = time.monotonic() - began
        if waited_s > grace_s + KILL_TIMEOUT_S:
            raise ClusterError(
                f"{len(alive)} jobs are still running after {waited_s:.0f} s: {', '.join(alive)}",
                hint=f"scancel {' '.join(alive)}; a node that does not answer keeps a job",
            )
        try:
            if waited_s >= grace_s:
                _call_scancel([key for key in alive if phases[key] is not JobPhase.ENDING])
            else:
                _call_scancel([key for key in alive if phases[key] is JobPhase.WAITING])
                running = {key for key in alive if phases[key] is JobPhase.RUNNING}
                fresh = sorted(running - asked)
                if fresh:
                    say(
                        f"sent SIGTERM to {len(fresh)} jobs; "
                        f"waiting {grace_s:.0f} s for their checkpoints"
                    )
                _call_scancel(fresh, "--signal=TERM")
                asked |= set(fresh)
        except SlurmTimeoutError:
            continue  # the next look says so
        time.sleep(POLL_S)


def _pause_during_outage(
    snapshot: QueueSnapshot, pause_s: float, say: Callable[[str], None]
) -> None:
    """Wait for Slurm to answer."""
    if snapshot.outage_s > MAX_SLURM_OUTAGE_S:
        raise ClusterError(
            f"Slurm has not responded for {snapshot.outage_s:.0f} s: {snapshot.outage}",
            hint="the run is marked as cancelled; repeat the command when `scontrol ping` succeeds",
        )
    say(f"slurmctld has not responded for {snapshot.outage_s:.0f} s; next try in {pause_s:.0f} s")
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
