"""Resubmission of a job's script under a new id, with dependents updated.

Whatever asks Slurm raises what `scontrol.py` raises.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jobs import (
    SlurmLaunchInfo,
    Submission,
    get_latest_submissions,
    read_submissions,
    record_submission,
)
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.submit_exactly_once import JobIdentity, submit_script

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 1.0


def submit_job_again(
    slurm: SlurmLaunchInfo,
    job: str,
    options: Sequence[str],
    *,
    timeout_s: float,
    hold: bool = False,
    own_id: str = "",
) -> str:
    """Submit a job's script once more, record that, and redirect who waits for it; the new number.

    `job` is its name within the run; `options` of sbatch replace those of the script. A job that
    runs and is to be followed by its script names itself by `own_id`. A slurmctld that is silent
    is waited for `timeout_s`. With `hold` a person, or the run, has to release it.
    """
    submissions = Path(slurm.submissions)
    before = get_latest_submissions(read_submissions(submissions)).get(job)
    options = [*options, *(["--hold"] if hold else [])]
    if own_id:  # what the script depends on has been met; but this job must be over
        options.append(f"--dependency=afterany:{own_id}")
    identity = JobIdentity.create(slurm.job_name, slurm.comment)
    environ = scontrol.strip_job_variables(os.environ)
    new_id = submit_script(
        Path(slurm.script), identity, options, environ=environ, timeout_s=timeout_s
    )
    submission = Submission(
        job=job,
        job_id=new_id,
        attempt=before.attempt if before else 1,
        submitted_at=time.time(),
        script=slurm.script,
        token=identity.token,
    )
    try:
        record_submission(submissions, submission)
    except OSError as error:  # commands find the job by its comment
        log.error("job %s is submitted and not recorded: %s", new_id, error)
    old_ids = dict.fromkeys(filter(None, (own_id, before.job_id if before else "")))
    retry_and_log(lambda: redirect_dependents(list(old_ids), new_id))
    return new_id


def retry_and_log(command: Callable[[], None], times: int = 3) -> None:
    """Repeat a command that Slurm does not take at once; what it says is logged, and no error."""
    for _ in range(times):
        try:
            return command()
        except ClusterError as error:
            log.warning("%s", error)
            time.sleep(RETRY_PAUSE_S)


def redirect_dependents(old_ids: Sequence[str], new_id: str) -> None:
    """Jobs that wait for the job's success would be cancelled, or wait for good."""
    waiting = scontrol.read_pending_dependencies()
    for old_id in old_ids:
        for waiting_id, dependency in waiting.items():
            changed = rewrite_dependency(dependency, old_id, new_id)
            if changed != dependency:
                scontrol.update_waiting_job(waiting_id, "Dependency", changed)


def rewrite_dependency(dependency: str, old_id: str, new_id: str) -> str:
    """A dependency in sbatch's words, with a job's new number in the place of an old one. Pure."""
    return re.sub(rf"\bafterok:{old_id}(?![0-9_])", f"afterok:{new_id}", dependency)
