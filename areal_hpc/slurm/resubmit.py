"""Resubmission of a job's script under a new id, with dependents updated.

Whatever asks Slurm raises what `scontrol.py` raises.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import SlurmCommandError
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

_AFTER_SUCCESS_PATTERN = re.compile(r"(afterok|aftercorr):([0-9]+)(?:_(\*|[0-9]+))?")


@dataclass(frozen=True, slots=True)
class JobIdChange:
    """A job that had one number, or two, and has another."""

    old_ids: tuple[str, ...]
    """As Slurm and as the run know it: `12` and `12_3` if it was an array of itself alone."""
    job_id: str


def submit_again_to_start_after_this_job(
    slurm: SlurmLaunchInfo,
    job: str,
    job_id: str,
    excluded_nodes: str,
    *,
    timeout_s: float,
    hold: bool = False,
) -> JobIdChange:
    """Submit the script of a job that runs, to start when this one has ended.

    A member of an array becomes an array of itself alone, under its index: who waits for what
    corresponds to it goes by that.

    `job` is its name within the run, `job_id` the number of this start; `excluded_nodes` are those
    that it must not get, in Slurm's notation. A slurmctld that is silent is waited for `timeout_s`.
    With `hold` it starts only once it is released, too.
    """
    before = get_latest_submissions(read_submissions(Path(slurm.submissions))).get(job)
    # What the script depends on has been met; but this job must be over.
    options = [f"--dependency=afterany:{job_id}"]
    if excluded_nodes:
        options.append(f"--exclude={excluded_nodes}")
    new_id = submit_again_and_record(slurm, job, options, timeout_s=timeout_s, hold=hold)
    return JobIdChange((job_id, before.job_id) if before else (job_id,), new_id)


def submit_again_and_record(
    slurm: SlurmLaunchInfo,
    job: str,
    options: Sequence[str],
    *,
    timeout_s: float,
    hold: bool = False,
) -> str:
    """Submit a job's script once more and record that; the new number.

    `options` of sbatch replace those of the script. With `hold` a person has to release it.
    """
    submissions = Path(slurm.submissions)
    before = get_latest_submissions(read_submissions(submissions)).get(job)
    member = get_array_index(before.job_id) if before else ""
    options = [*options, *([f"--array={member}"] if member else []), *(["--hold"] if hold else [])]
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
    return new_id


def redirect_dependents_to_new_id(job_id_change: JobIdChange) -> None:
    """Jobs that wait for the job's success would be cancelled at the end of its old number."""
    waiting = scontrol.read_pending_dependencies()
    for old_id in job_id_change.old_ids:
        array = old_id.partition("_")[0]
        others: list[str] = []
        if any(f"afterok:{array}_*" in one for one in waiting.values()):
            with contextlib.suppress(SlurmCommandError):  # one that Slurm has forgotten is over
                others = [one for one in scontrol.list_array_members(array) if one != old_id]
        for waiting_id, dependency in waiting.items():
            changed = rewrite_dependency(
                dependency, old_id, job_id_change.job_id, waiting_id=waiting_id, other_tasks=others
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
