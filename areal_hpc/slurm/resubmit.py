"""Resubmission of a job's script under a new id, with dependents updated.

Whatever asks Slurm raises what `scontrol.py` raises.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_hpc.errors import ClusterError, SlurmCommandError
from areal_hpc.rundir.jobs import (
    SlurmLaunchInfo,
    Submission,
    get_array_index,
    get_latest_submissions,
    read_submissions,
    record_submission,
)
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.submit_exactly_once import JobIdentity, submit_script

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 1.0

_AFTER_SUCCESS_PATTERN = re.compile(r"(afterok|aftercorr):([0-9]+)(?:_(\*|[0-9]+))?")


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

    A member of an array becomes an array of itself alone, under its index: who waits for what
    corresponds to it goes by that.

    `job` is its name within the run; `options` of sbatch replace those of the script. A job that
    runs and is to be followed by its script names itself by `own_id`. A slurmctld that is silent
    is waited for `timeout_s`. With `hold` a person, or the run, has to release it.
    """
    submissions = Path(slurm.submissions)
    before = get_latest_submissions(read_submissions(submissions)).get(job)
    member = get_array_index(before.job_id) if before else ""
    options = [*options, *([f"--array={member}"] if member else []), *(["--hold"] if hold else [])]
    if own_id:  # what the script depends on has been met; but this job must be over
        options.append(f"--dependency=afterany:{own_id}")
    identity = JobIdentity.create(slurm.job_name, slurm.comment)
    environ = scontrol.strip_job_variables(os.environ)
    new_id = submit_script(
        Path(slurm.script), identity, options, environ=environ, timeout_s=timeout_s
    )
    if member:
        new_id = f"{new_id}_{member}"
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
    # As Slurm and as the run know it: `12` and `12_3` if it was an array of itself alone.
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
        array = old_id.partition("_")[0]
        others: list[str] = []
        if any(f"afterok:{array}_*" in one for one in waiting.values()):
            with contextlib.suppress(SlurmCommandError):  # one that Slurm has forgotten is over
                others = [one for one in scontrol.list_array_members(array) if one != old_id]
        for waiting_id, dependency in waiting.items():
            changed = rewrite_dependency(
                dependency, old_id, new_id, waiting_id=waiting_id, other_tasks=others
            )
            if changed != dependency:
                scontrol.update_waiting_job(waiting_id, "Dependency", changed)


def rewrite_dependency(
    dependency: str,
    old_id: str,
    new_id: str,
    *,
    waiting_id: str = "",
    other_tasks: Sequence[str] = (),
) -> str:
    """A dependency in sbatch's words, with a job's new number in the place of an old one. Pure.

    A member of an array that waits for what corresponds to it (`aftercorr`) waits for the member of
    its own index alone; who waits for all of an array goes on waiting for the
    `other_tasks` of `old_id`.
    """
    array, _, member = old_id.partition("_")
    names_it = (None, "*", member) if member else (None,)

    def renamed(match: re.Match[str]) -> str:
        kind, number, index = match.groups()
        if number != array or index not in names_it:
            return match[0]
        if kind == "aftercorr":
            return f"afterok:{new_id}" if get_array_index(waiting_id) == member else match[0]
        awaited = [*other_tasks, new_id] if index == "*" else [new_id]
        return ",".join(f"afterok:{one}" for one in awaited)

    return _AFTER_SUCCESS_PATTERN.sub(renamed, dependency)
