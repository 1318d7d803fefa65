"""Shared-storage check from a compute node, by a short job."""

from __future__ import annotations

import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.launch.doctor.slurm_checks import get_sbatch_flags
from areal_hpc.recipe.sections.cluster import JobOptions
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.queue import JobQueue, is_alive
from areal_hpc.slurm.reasons import explain_reason

POLL_S = 2.0
JOB_TIMEOUT_S = 300.0
"""For the job to start and end."""
MAX_VISIBILITY_S = 60
"""For a file to be seen on another node: NFS caches directories for up to a minute."""

_SCRIPT = """#!/bin/bash
cd {folder} || exit 1
for try in $(seq {within_s}); do
  [ -e question ] && break
  sleep 1
done
cat question > .answer && hostname >> .answer && mv .answer answer
"""


def check_storage_from_node(
    fileroot: Path,
    options: JobOptions,
    say: Callable[[str], None],
    patience_s: float = JOB_TIMEOUT_S,
) -> CheckResult:
    """Submit the job, wait for its answer, and leave neither job nor file."""
    folder = fileroot / f".doctor-job.{secrets.token_hex(4)}"
    token = secrets.token_hex(16)
    try:
        folder.mkdir(parents=True)
        (folder / "question").write_text(f"{token}\n")
        script = JobPaths(folder).script
        script.write_text(
            _SCRIPT.format(folder=shlex.quote(str(folder)), within_s=MAX_VISIBILITY_S)
        )
        job_id = run_slurm_command(
            *("sbatch", "--parsable", "--job-name=areal-hpc-doctor", "--time=2", "--ntasks=1"),
            *(*get_sbatch_flags(options), f"--output={folder}/output", str(script)),
        ).split(";")[0]
    except OSError as error:
        return fail("shared", f"{folder}: {error.strerror}", "choose another cluster.fileroot")
    except ClusterError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return fail("shared", error.problems[0].message, "areal-hpc doctor without --check-node")
    say(f"job {job_id.strip()} was submitted; waiting up to {patience_s:.0f} s for its answer")
    try:
        return _await(folder, job_id.strip(), token, patience_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _await(folder: Path, job_id: str, token: str, patience_s: float) -> CheckResult:
    queue, give_up_at, waits_for = JobQueue(), time.monotonic() + patience_s, "it did not start"
    ended_at: float | None = None
    while time.monotonic() < give_up_at:
        if (folder / "answer").exists():
            return _judge((folder / "answer").read_text().split(), token)
        look = queue.poll([job_id])
        found = look.jobs.get(job_id)
        if found and not is_alive(found.state):
            ended_at = ended_at or time.monotonic()
        if found and ended_at and time.monotonic() - ended_at > MAX_VISIBILITY_S:
            return fail(
                "shared",
                f"job {job_id} on {found.nodes or 'no node'} did not answer ({found.state.name}): "
                f"{folder.parent} is not the same there",
                "name a file system that compute nodes mount at the same path",
            )
        if found and found.reason:
            waits_for = explain_reason(found.reason).meaning
        time.sleep(max(POLL_S, queue.pause_s if look.silence else 0.0))
    run_slurm_command("scancel", job_id)
    hint = "try again when nodes are free"
    return warn("shared", f"job {job_id} did not answer in time: {waits_for}", hint)


def _judge(words: list[str], token: str) -> CheckResult:
    node = words[1] if len(words) > 1 else "?"
    if not words or words[0] != token:
        return fail("shared", f"{node} sees different content", "use another file system")
    where = "the same node" if node == socket.gethostname() else node
    return ok("shared", f"{where} saw the file, and its answer is visible here")
