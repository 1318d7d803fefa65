"""Submission of a script to Slurm, once, whatever sbatch answers; and once more under a new id.

A busy slurmctld carries out requests that it answers too late ("Socket timed out on send/recv
operation"). Every submission therefore has a token, in the job's name and in its comment: after an
unclear answer the job is looked up by it, and adopted if it is there, before sbatch is tried again.
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
"""Longest that one sbatch may take; it gives up by itself after MessageTimeout (10 s)."""
SUBMIT_TIMEOUT_S = 600.0
"""Longest that a submission waits for a slurmctld that does not answer."""
JOB_LOOKUP_DURATION_S = 5.0
"""Time in which a slurmctld that answers again works off the requests that it had received."""
RETRY_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Names of one submission in Slurm. The token tells it from others; it authorizes nothing."""

    name: str
    """Job name without the token."""
    comment: str
    """The run directory."""
    token: str

    @classmethod
    def create(cls, job_name: str, comment: str) -> "JobIdentity":
        return cls(job_name, comment, secrets.token_hex(4))

    def build_sbatch_options(self) -> list[str]:
        """Options of sbatch, which go before those of the script."""
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
    """Submit an sbatch script, and wait out a slurmctld that does not answer; the job's number."""
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
    """Number of the job that bears the identity; None if Slurm answers and does not have it."""
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
    """Number of the job that bears an identity; None if there is none."""
    shown = run_slurm_command("squeue", "--me", "--noheader", "--states=all", "--format=%i %j %k")
    for line in shown.splitlines():
        job_id, _, names = line.strip().partition(" ")
        if f".{identity.token} " in f"{names} " or identity.comment_tag in names:
            return job_id
    return None


def release_jobs(job_ids: Iterable[str], timeout_s: float = SUBMIT_TIMEOUT_S) -> None:
    """Let jobs that were submitted held start."""
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
    """Take back jobs that were just submitted; the error if Slurm did not do it."""
    try:
        if job_ids:
            run_slurm_command("scancel", *job_ids)
    except ClusterError as error:
        return error
    return None


_TEMPORARY_REFUSAL_MESSAGES = ("submit limit", "maxjobcount", "try again", "temporarily")
"""Parts of sbatch's words where the same job may be accepted later."""
_NAMED_LIMIT_PATTERN = re.compile(r"\b(?:QOS|Assoc)\w*Limit\b")
_JOB_COUNT_LIMIT = "SubmitJob"
"""Part of Slurm's names of limits of the number of jobs."""


def is_temporary_refusal(sbatch_error: str) -> bool:
    """True if the same job may be accepted later, once others have ended. Pure.

    Slurm has one sentence for all limits of a QOS, and may name the limit beside it.
    """
    if named := _NAMED_LIMIT_PATTERN.findall(sbatch_error):
        return any(_JOB_COUNT_LIMIT in name for name in named)
    return any(words in sbatch_error.lower() for words in _TEMPORARY_REFUSAL_MESSAGES)


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
        scontrol.retry_command(lambda: redirect_dependents(old_id, new_id))
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
