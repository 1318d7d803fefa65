"""Submission of a script to Slurm, once, whatever sbatch answers.

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
