"""A short Slurm job of doctor's own: submitted, awaited by the files that it leaves, cancelled."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.queue import QueuePoller, is_live_state
from areal_hpc.slurm.reasons import explain_reason

POLL_S = 2.0
FILE_VISIBLE_TIMEOUT_S = 60
"""For a file to be seen on another node: NFS caches directories for up to a minute."""
LOG_TAIL_BYTES = 4096


class LateJobError(ClusterError):
    """The job did not start or end in time."""


@contextmanager
def submit_short_job(
    folder: Path, script: str, flags: Sequence[str], print_line: Callable[[str], None]
) -> Iterator[str]:
    """Submit a script that works in a folder on shared storage; cancel it when the context ends."""
    JobPaths(folder).script.write_text(script)
    answer = run_slurm_command(
        *("sbatch", "--parsable", "--job-name=areal-hpc-doctor", *flags),
        *(f"--output={folder}/output", str(JobPaths(folder).script)),
    )
    job_id = answer.split(";")[0].strip()
    print_line(f"job {job_id} was submitted; waiting for its answer")
    try:
        yield job_id
    finally:
        with suppress(ClusterError):
            run_slurm_command("scancel", "--quiet", job_id)


def await_files(job_id: str, files: Sequence[Path], timeout_s: float) -> None:
    """Wait until a job has left all files.

    Raises:
        LateJobError: It takes too long.
        ClusterError: It ended without them.
    """
    queue, waits_for = QueuePoller(), "it did not start"
    give_up_at, ended_at = time.monotonic() + timeout_s, None
    while time.monotonic() < give_up_at:
        if all(file.exists() for file in files):
            return
        snapshot = queue.poll([job_id])
        job = snapshot.jobs.get(job_id)
        if job and not is_live_state(job.state):
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > FILE_VISIBLE_TIMEOUT_S:
                output = read_tail_lines(files[0].with_name("output"), LOG_TAIL_BYTES)
                raise ClusterError(
                    f"job {job_id} on {job.nodes or 'no node'} ended without an answer "
                    f"({job.state.name}): {output.decode(errors='replace').strip()}",
                    hint="name a file system that compute nodes mount at the same path: "
                    f"{files[0].parent} may be another one there",
                )
        if job and job.reason:
            waits_for = explain_reason(job.reason).meaning
        time.sleep(max(POLL_S, queue.pause_s if snapshot.outage else 0.0))
    raise LateJobError(
        f"job {job_id} gave no answer within {timeout_s / 60:.0f} min: {waits_for}",
        hint="try again when nodes are free",
    )
