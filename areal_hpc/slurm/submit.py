"""Submission of jobs through submitit, with scripts and payloads. Only this module imports it."""

import os
import re
import shutil
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
import psutil
import submitit

from areal_hpc.errors import (
    ClusterError,
    RecipeError,
    SlurmCommandError,
    SlurmNotFoundError,
    SlurmTimeoutError,
)
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.rundir.jobs import (
    LaunchFile,
    TaskExit,
    read_task_exits,
)
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm.batch_script import PAYLOAD_FILE, JobRequest
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.script_submission import (
    JobIdentity,
    is_temporary_refusal,
    submit_script,
)
from areal_hpc.wire.fault_points import fault_point

SupervisorEntry: TypeAlias = Callable[[str], None]
"""Function that submitit calls in every task, with the path of the job's `launch.json`."""

NO_TIME_LIMIT_MINUTES = 60 * 24 * 365
"""Time limit of local jobs: submitit requires a number."""


class JobHandle(ABC):
    """Handle of a job that a foreground launcher started."""

    def __init__(self, launch: LaunchFile, start_id: str, output_dir: Path) -> None:
        self._launch = launch
        self.name = launch.job.name
        self.start_id = start_id
        """Identifier of this start, for the event log."""
        self.output_dir = output_dir
        """Folder of its supervisors' output."""

    def read_task_exits(self) -> list[TaskExit]:
        """Read the exit statuses of the ended tasks of this start, lowest rank first."""
        own = self._launch.step.incarnation if self._launch.step else ""
        exits = read_task_exits(self._launch.paths).values()
        return [task_exit for task_exit in exits if task_exit.incarnation == own]

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether no task of the job runs any more."""

    @abstractmethod
    def request_stop(self) -> None:
        """Signal every task to stop, and return at once."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes of the job."""


class LocalJobHandle(JobHandle):
    """Handle of a job on this machine."""

    def __init__(self, launch: LaunchFile, job: submitit.Job[None]) -> None:
        super().__init__(launch, str(job.job_id), launch.paths.submitit_dir)
        self._job = job

    def is_done(self) -> bool:
        return bool(self._job.done())

    def request_stop(self) -> None:
        process = self._job._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        process = self._job._process
        if process is None or process.poll() is not None:
            return
        tree = psutil.Process(process.pid)
        for member in [*tree.children(recursive=True), tree]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def submit_local(launch: LaunchFile, entry: SupervisorEntry) -> LocalJobHandle:
    """Start a job on this machine through submitit's local executor."""
    launch_path = write_launch_file(launch)
    executor = submitit.LocalExecutor(
        folder=launch.paths.submitit_dir / "%j", python=launch.pythons[launch.job.role]
    )
    executor.update_parameters(timeout_min=NO_TIME_LIMIT_MINUTES, tasks_per_node=launch.job.tasks)
    with _ignored_sigint():
        return LocalJobHandle(launch, executor.submit(entry, str(launch_path)))


@contextmanager
def _ignored_sigint() -> Iterator[None]:
    """Make processes that start in the context ignore SIGINT.

    On Ctrl-C submitit's controller kills its tasks after one second, which would cut off the
    trainer's last checkpoint. Python can change signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def write_launch_file(launch: LaunchFile) -> Path:
    """Write `launch.json`, and remove the files of an earlier submission's end."""
    paths = launch.paths
    paths.root.mkdir(parents=True, exist_ok=True)
    for stale in (
        *paths.map_task_exit_files().values(),
        paths.failure_count,
        paths.caretaker_submission_count,
    ):
        stale.unlink(missing_ok=True)
    shutil.rmtree(paths.rank_restarts_dir, ignore_errors=True)
    # Variables and agent arguments may hold keys of other services.
    write_atomic_private(paths.launch, msgspec.json.encode(launch))
    return paths.launch


class _SlurmExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    @classmethod
    def affinity(cls) -> int:
        return 2


def render_script(request: JobRequest) -> str:
    """Render the sbatch script of a job, exactly as submitted."""
    executor = _SlurmExecutor(folder=request.submitit_dir, python=request.python)
    executor.update_parameters(**request.parameters)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def write_job_files(request: JobRequest, launch: LaunchFile, entry: SupervisorEntry) -> JobPaths:
    """Write all files of a job under Slurm, so that `sbatch job.sbatch` is enough to start it."""
    launch_path = write_launch_file(launch)
    request.submitit_dir.mkdir(parents=True, exist_ok=True)
    submitit.core.utils.DelayedSubmission(entry, str(launch_path)).dump(
        request.submitit_dir / PAYLOAD_FILE
    )
    launch.paths.script.write_text(render_script(request))
    return launch.paths


def refuse_federation(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse federations of clusters, where a job could come back on another cluster.

    Raises:
        RecipeError: This cluster is in a federation, or the environment names others.
    """
    if clusters := environ.get("SLURM_CLUSTERS"):
        raise RecipeError(
            f"SLURM_CLUSTERS={clusters} sends jobs to other clusters, which is not supported",
            key="SLURM_CLUSTERS",
            hint="unset it, and submit on a login node of the cluster itself",
        )
    with suppress(ClusterError):  # the submission reports errors of Slurm
        output = run_slurm_command("scontrol", "show", "federation")
        if match := re.search(r"^Federation: *(\S+)", output):
            raise RecipeError(
                f"the cluster is in federation {match[1]}, which is not supported",
                key="cluster.slurm",
                hint="submit on a cluster that is in no federation",
            )


def submit_held_job(
    request: JobRequest,
    launch: LaunchFile,
    entry: SupervisorEntry,
    report_outage: Callable[[str], None],
) -> tuple[str, str]:
    """Submit a job held; return its id and its token. The script stays in its folder."""
    job = write_job_files(request, launch, entry)
    identity = JobIdentity.create(request.name, request.comment)
    try:
        job_id = submit_script(job.script, identity, ["--hold"], report_outage=report_outage)
    except SlurmNotFoundError as error:
        raise ClusterError(
            "there is no sbatch on this machine", hint="submit from a login node of the cluster"
        ) from error
    except SlurmTimeoutError as error:
        raise ClusterError(
            f"Slurm did not answer while job {request.job} was submitted: "
            f"{error.problems[0].message}",
            hint="repeat the command when `scontrol ping` succeeds; "
            "`areal-hpc status` names what reached Slurm, which is held and does not start",
        ) from error
    except SlurmCommandError as error:
        raise _build_refusal_error(request, error) from error
    fault_point("submit.before_record")
    return job_id, identity.token


def _build_refusal_error(
    request: JobRequest, refusal: SlurmCommandError
) -> ClusterError | RecipeError:
    reason = refusal.problems[0].message.removeprefix("sbatch: ")
    message = f"sbatch rejected job {request.job}:\n{reason}"
    if is_temporary_refusal(reason):
        hint = (
            "repeat the command when other jobs of yours have ended; areal-hpc doctor RECIPE "
            "says whether the limit has room for all jobs of this run"
        )
        return ClusterError(message, key="cluster.slurm", hint=hint)
    hint = "areal-hpc doctor RECIPE says what Slurm takes; areal-hpc submit --dry-run shows scripts"
    return RecipeError(message, key="cluster.slurm", hint=hint)


def stop_jobs(
    handles: Sequence[JobHandle], grace_s: float, is_urgent: Callable[[], bool] | None = None
) -> None:
    """Signal every job to stop; kill those left after `grace_s`, or once `is_urgent()` is true."""
    for handle in handles:
        handle.request_stop()
    give_up_at = time.monotonic() + grace_s
    while not all(handle.is_done() for handle in handles) and time.monotonic() < give_up_at:
        if is_urgent and is_urgent():
            break
        time.sleep(0.1)
    for handle in handles:
        handle.kill()
