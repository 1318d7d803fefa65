"""JobSpec -> submitit -> a handle. The only file that imports submitit."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import submitit

from areal_hpc.cluster.jobspec import Launch, Outcome
from areal_hpc.cluster.supervisor import run_job

FOREVER_MIN = 60 * 24 * 365
"""Local jobs have no time limit; submitit wants a number."""


class JobHandle:
    """A submitted job."""

    def __init__(self, launch: Launch, job: submitit.Job[None]) -> None:
        self.name = launch.job.name
        self._launch = launch
        self._job = job

    @property
    def job_id(self) -> str:
        """The executor's id of the job."""
        return str(self._job.job_id)

    def done(self) -> bool:
        """True once no task of the job runs any more."""
        return bool(self._job.done())

    def outcomes(self) -> list[Outcome]:
        """How the tasks that have ended did so, lowest rank first."""
        files = sorted(Path(self._launch.job_dir).glob("outcome.*.json"))
        return [msgspec.json.decode(file.read_bytes(), type=Outcome) for file in files]

    def request_stop(self) -> None:
        """Ask every task to stop (SIGTERM). Returns at once."""
        process = self._job._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the job's whole process tree."""
        process = self._job._process
        if process is None or process.poll() is not None:
            return
        tree = psutil.Process(process.pid)
        for member in [*tree.children(recursive=True), tree]:
            _kill(member)
        process.wait()


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def submit_local(launch: Launch) -> JobHandle:
    """Start a job on this machine through submitit's local executor."""
    job_dir = Path(launch.job_dir)
    job_dir.mkdir(parents=True, exist_ok=True)
    for stale in job_dir.glob("outcome.*.json"):
        stale.unlink()
    launch_path = job_dir / "launch.json"
    launch_path.write_bytes(msgspec.json.encode(launch))
    executor = submitit.LocalExecutor(
        folder=job_dir / "submitit" / "%j", python=launch.pythons[launch.job.role]
    )
    executor.update_parameters(timeout_min=FOREVER_MIN, tasks_per_node=launch.job.tasks)
    with _interrupts_ignored():
        return JobHandle(launch, executor.submit(run_job, str(launch_path)))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let children inherit an ignored SIGINT.

    submitit's controller answers Ctrl-C by killing its tasks after one second, which would cut
    off the trainer's last commit.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def stop_jobs(handles: Sequence[JobHandle], grace_s: float) -> None:
    """Stop every job: politely first, by force after `grace_s`."""
    for handle in handles:
        handle.request_stop()
    give_up_at = time.monotonic() + grace_s
    while not all(handle.done() for handle in handles) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    for handle in handles:
        handle.kill()


def interpreter_of(role: str, configured: str) -> str:
    """The Python that runs a role's processes.

    Args:
        role: `serve`, `train` or `agents`.
        configured: A path, or `auto`: the checkout's own environment of that role if it exists,
            else the interpreter that runs now.
    """
    if configured != "auto":
        return configured
    checkout = Path(__file__).resolve().parents[2]
    candidate = checkout / ".venvs" / role / "bin" / "python"
    return str(candidate) if candidate.exists() else sys.executable
