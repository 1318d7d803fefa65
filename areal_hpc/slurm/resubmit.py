"""Resubmission of a job's script under a new id, with dependents updated.

Whatever asks Slurm raises what `scontrol.py` raises.
"""

import logging
import os
import re
import time
from collections.abc import Sequence

from areal_hpc.rundir.jobs import (
    Submission,
    get_latest_submissions,
    read_submissions,
    record_submission,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.submit_exactly_once import JobIdentity, submit_script

log = logging.getLogger(__name__)


def submit_job_again(paths: RunPaths, job: str, options: Sequence[str], *, timeout_s: float) -> str:
    """Submit a job's script once more, record that, and redirect who waits for it; the new number.

    `job` is its name within the run; `options` of sbatch replace those of the script. A slurmctld
    that is silent is waited for `timeout_s`.
    """
    before = get_latest_submissions(read_submissions(paths.submissions)).get(job)
    script = paths.job(job).script
    identity = JobIdentity.create(f"{paths.queue_name}-{job}", str(paths.root))
    environ = scontrol.strip_job_variables(os.environ)
    new_id = submit_script(script, identity, options, environ=environ, timeout_s=timeout_s)
    submission = Submission(
        job=job,
        job_id=new_id,
        attempt=before.attempt if before else 1,
        submitted_at=time.time(),
        script=str(script),
        token=identity.token,
    )
    try:
        record_submission(paths.submissions, submission)
    except OSError as error:  # commands find the job by its comment
        log.error("job %s is submitted and not recorded: %s", new_id, error)
    if before is not None:
        old_id = before.job_id
        scontrol.retry_and_log(lambda: redirect_dependents(old_id, new_id))
    return new_id


def redirect_dependents(old_id: str, new_id: str) -> None:
    """Jobs that wait for the job's success would wait for good."""
    for waiting_id, dependency in scontrol.read_pending_dependencies().items():
        changed = rewrite_dependency(dependency, old_id, new_id)
        if changed != dependency:
            scontrol.update_waiting_job(waiting_id, "Dependency", changed)


def rewrite_dependency(dependency: str, old_id: str, new_id: str) -> str:
    """A dependency in sbatch's words, with a job's new number in the place of an old one. Pure."""
    return re.sub(rf"\bafterok:{old_id}(?![0-9_])", f"afterok:{new_id}", dependency)


def build_caretaker_dependency(leader_id: str, other_ids: Sequence[str]) -> str:
    """What the caretaker's job of a run waits for, in sbatch's words. Pure.

    All jobs of the run are over, and the leading one has not ended well: else Slurm removes it. One
    that was never submitted has no id.
    """
    leader = [f"afternotok:{leader_id}"] if leader_id else []
    others = [f"afterany:{':'.join(other_ids)}"] if other_ids else []
    return ",".join([*leader, *others])
