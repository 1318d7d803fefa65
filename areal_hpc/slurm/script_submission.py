"""Submission of a script to Slurm exactly once, and its resubmission under a new id.

A busy slurmctld carries out requests that it answers too late ("Socket timed out on send/recv
operation"). Every submission therefore has a token in the job's name and comment. After an unclear
answer the job is looked up by the token, and adopted if it exists, before another sbatch.
"""

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError, SlurmTimeoutError
from areal_hpc.rundir.jobs import (
    Submission,
    get_latest_submissions,
    read_submissions,
    record_submission,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.commands import build_comma_lists, run_slurm_command

log = logging.getLogger(__name__)

SBATCH_TIMEOUT_S = 60.0
"""Longest duration of one sbatch, which gives up by itself after MessageTimeout (10 s)."""
SUBMIT_TIMEOUT_S = 600.0
"""Longest wait of a submission for a slurmctld that does not answer."""
JOB_LOOKUP_DURATION_S = 5.0
"""Time in which a slurmctld that answers again processes its earlier requests."""
RETRY_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Names of one submission in Slurm. The token identifies it and authorizes nothing."""

    name: str
    """Job name without the token."""
    comment: str
    """The run directory."""
    token: str

    @classmethod
    def create(cls, job_name: str, comment: str) -> "JobIdentity":
        return cls(job_name, comment, secrets.token_hex(4))

    def build_sbatch_options(self) -> list[str]:
        """Build options of sbatch, which override those of the script."""
        return [
            f"--job-name={self.name}.{self.token}",
            f"--comment={self.comment} {self.comment_tag}",
        ]

    @property
    def comment_tag(self) -> str:
        return f"token={self.token}"


def submit_script(
    script: Path,
    identity: JobIdentity,
    options: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    timeout_s: float = SUBMIT_TIMEOUT_S,
    report_outage: Callable[[str], None] = log.warning,
) -> str:
    """Submit an sbatch script, wait out outages of slurmctld, and return the job id."""
    give_up_at = time.monotonic() + timeout_s
    command = ["sbatch", "--parsable", *identity.build_sbatch_options(), *options, str(script)]
    while True:
        try:
            printed = run_slurm_command(*command, environ=environ, timeout_s=SBATCH_TIMEOUT_S)
            return printed.split(";")[0].strip()
        except SlurmTimeoutError as silence:
            report_outage(f"{silence.problems[0].message}; looking for the job before another try")
            if (job_id := _wait_for_accepted_job(identity, give_up_at)) is not None:
                report_outage(f"job {job_id} was accepted nevertheless")
                return job_id
            if time.monotonic() >= give_up_at:
                raise


def _wait_for_accepted_job(identity: JobIdentity, give_up_at: float) -> str | None:
    """Return the id of the job with the identity; None if Slurm answers and does not have it."""
    answered_at: float | None = None
    while answered_at is None or time.monotonic() - answered_at < JOB_LOOKUP_DURATION_S:
        try:
            if (job_id := find_submitted_job_id(identity)) is not None:
                return job_id
            answered_at = answered_at or time.monotonic()
        except SlurmTimeoutError:
            answered_at = None
            if time.monotonic() >= give_up_at:
                raise
        time.sleep(RETRY_PAUSE_S)
    return None


def find_submitted_job_id(identity: JobIdentity) -> str | None:
    """Return the id of the job with an identity; None if there is none."""
    output = run_slurm_command("squeue", "--me", "--noheader", "--states=all", "--format=%i %j %k")
    for line in output.splitlines():
        job_id, _, names = line.strip().partition(" ")
        if f".{identity.token} " in f"{names} " or identity.comment_tag in names:
            return job_id
    return None


def release_jobs(job_ids: Iterable[str], timeout_s: float = SUBMIT_TIMEOUT_S) -> None:
    """Release jobs that were submitted held."""
    give_up_at = time.monotonic() + timeout_s
    for ids in build_comma_lists(list(job_ids)):
        while True:
            try:
                run_slurm_command("scontrol", "release", ids)
                break
            except SlurmTimeoutError:
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(RETRY_PAUSE_S)


def try_to_cancel_jobs(job_ids: Sequence[str]) -> ClusterError | None:
    """Cancel jobs that were just submitted; return the error if Slurm refused."""
    try:
        if job_ids:
            run_slurm_command("scancel", *job_ids)
    except ClusterError as error:
        return error
    return None


_TEMPORARY_REFUSAL_MESSAGES = ("submit limit", "maxjobcount", "try again", "temporarily")
"""Parts of sbatch's messages for refusals of jobs that it may accept later."""
_NAMED_LIMIT_PATTERN = re.compile(r"\b(?:QOS|Assoc)\w*Limit\b")
_JOB_COUNT_LIMIT = "SubmitJob"
"""Part of Slurm's names of limits of the number of jobs."""


def is_temporary_refusal(sbatch_error: str) -> bool:
    """Return whether Slurm may accept the same job later, once others have ended.

    Slurm has one message for all limits of a QOS, and may name the limit beside it.
    """
    if limits := _NAMED_LIMIT_PATTERN.findall(sbatch_error):
        return any(_JOB_COUNT_LIMIT in limit for limit in limits)
    return any(words in sbatch_error.lower() for words in _TEMPORARY_REFUSAL_MESSAGES)


def submit_job_again(paths: RunPaths, job: str, options: Sequence[str], *, timeout_s: float) -> str:
    """Submit a job's script again, record it, redirect its dependents, and return the new id.

    `job` is its name within the run; `options` of sbatch override those of the script. An outage of
    slurmctld may last `timeout_s`.
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
        scontrol.retry_command(lambda: redirect_dependents(old_id, new_id))
    return new_id


def redirect_dependents(old_id: str, new_id: str) -> None:
    """Make jobs that wait for the old job's success wait for the new job's."""
    for waiting_id, dependency in scontrol.read_pending_dependencies().items():
        changed = rewrite_dependency(dependency, old_id, new_id)
        if changed != dependency:
            scontrol.update_waiting_job(waiting_id, "Dependency", changed)


def rewrite_dependency(dependency: str, old_id: str, new_id: str) -> str:
    """Replace a job's old id by its new one in a dependency in sbatch's notation."""
    return re.sub(rf"\bafterok:{old_id}(?![0-9_])", f"afterok:{new_id}", dependency)


def build_caretaker_dependency(leader_id: str, other_ids: Sequence[str]) -> str:
    """Build the dependency of a run's caretaker job in sbatch's notation.

    It is met when all jobs of the run are over and the leading job did not succeed; if that one
    succeeds Slurm removes the caretaker. A job that was never submitted has no id.
    """
    leader = [f"afternotok:{leader_id}"] if leader_id else []
    others = [f"afterany:{':'.join(other_ids)}"] if other_ids else []
    return ",".join([*leader, *others])
