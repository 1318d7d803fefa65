"""Scripts and payloads of jobs, and their submission; the only module that imports submitit."""

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
"""Local jobs have no time limit; submitit wants a number."""


class JobHandle(ABC):
    """A job that a foreground launcher started."""

    def __init__(self, launch: LaunchFile, start_id: str, output_dir: Path) -> None:
        self._launch = launch
        self.name = launch.job.name
        self.start_id = start_id
        """Identifier of this start, for the event log."""
        self.output_dir = output_dir
        """Folder of what its supervisors print."""

    def read_task_exits(self) -> list[TaskExit]:
        """Exit statuses of the tasks of this start that have ended, lowest rank first."""
        own = self._launch.step.incarnation if self._launch.step else ""
        found = read_task_exits(self._launch.paths).values()
        return [one for one in found if one.incarnation == own]

    @abstractmethod
    def is_done(self) -> bool:
        """True once no task of the job runs any more."""

    @abstractmethod
    def request_stop(self) -> None:
        """Ask every task to stop. Returns at once."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes of the job."""


class LocalJobHandle(JobHandle):
    """A job on this machine."""

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
    """Have processes that start in the context ignore SIGINT.

    submitit's controller answers Ctrl-C by killing its tasks after one second, which would cut off
    the trainer's last checkpoint. Outside the main thread Python lets nobody change that.
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
    """Put `launch.json` in place, and away what tells of an earlier submission's end."""
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
    """The sbatch script of a job, to the letter."""
    executor = _SlurmExecutor(folder=request.submitit_dir, python=request.python)
    executor.update_parameters(**request.parameters)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def write_job_files(request: JobRequest, launch: LaunchFile, entry: SupervisorEntry) -> JobPaths:
    """Put everything in place that a job under Slurm needs; the names of its files.

    `sbatch job.sbatch` is then enough to start it.
    """
    launch_path = write_launch_file(launch)
    request.submitit_dir.mkdir(parents=True, exist_ok=True)
    submitit.core.utils.DelayedSubmission(entry, str(launch_path)).dump(
        request.submitit_dir / PAYLOAD_FILE
    )
    launch.paths.script.write_text(render_script(request))
    return launch.paths


def refuse_federation(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse clusters among which Slurm chooses: a job could come back on another one.

    Raises:
        RecipeError: This cluster is in a federation, or the environment names others.
    """
    if named := environ.get("SLURM_CLUSTERS"):
        raise RecipeError(
            f"SLURM_CLUSTERS={named} sends jobs to other clusters, which is not supported",
            key="SLURM_CLUSTERS",
            hint="unset it, and submit on a login node of the cluster itself",
        )
    with suppress(ClusterError):  # what Slurm has to say about jobs it says at their submission
        shown = run_slurm_command("scontrol", "show", "federation")
        if found := re.search(r"^Federation: *(\S+)", shown):
            raise RecipeError(
                f"the cluster is in federation {found[1]}, which is not supported",
                key="cluster.slurm",
                hint="submit on a cluster that is in no federation",
            )


def submit_held_job(
    request: JobRequest,
    launch: LaunchFile,
    entry: SupervisorEntry,
    report_outage: Callable[[str], None],
) -> tuple[str, str]:
    """Hand a job to Slurm, held; its number and its token. The script stays in its folder."""
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
    said = refusal.problems[0].message.removeprefix("sbatch: ")
    message = f"sbatch rejected job {request.job}:\n{said}"
    if is_temporary_refusal(said):
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
    """Stop every job: politely first, by force after `grace_s`, or once `is_urgent` says so."""
    for handle in handles:
        handle.request_stop()
    give_up_at = time.monotonic() + grace_s
    while not all(handle.is_done() for handle in handles) and time.monotonic() < give_up_at:
        if is_urgent and is_urgent():
            break
        time.sleep(0.1)
    for handle in handles:
        handle.kill()
