"""Files under `jobs/` (specifications, launches, exits, submissions) and the CANCELLED marker."""

import contextlib
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from areal_hpc.errors import IdleError, LostTrainerRankError
from areal_hpc.rundir.files import log_storage_errors, make_folder, write_atomic
from areal_hpc.rundir.jsonl import append_line, read_readable_records
from areal_hpc.rundir.paths import JobPaths, RunPaths
from areal_hpc.wire.decoding import decode_json

STOPPED_EXIT_CODE = 143
"""Exit code of a task that was stopped: neither success nor failure."""
REQUEUE_MARGIN_S = 10.0
"""Time reserved for the request of another start from Slurm."""
IDLE_EXIT_CODE = IdleError.exit_code
"""Exit code of a process without work for too long: its job ends until it is needed."""
CARETAKER_JOB = "caretaker"
"""Job that waits until all other jobs of the run have ended, and submits the missing ones again."""
LOST_RANK_EXIT_CODE = LostTrainerRankError.exit_code
"""Exit code of a rank that ended because another rank vanished; that rank's end is the cause."""
EXCLUDED_NODE_LIFETIME_S = 86400.0
"""Time for which the run excludes a node that failed its check."""


class ProcessSpec(Struct, frozen=True):
    """One process of a job, started by the job's supervisor on its node."""

    name: str
    """Name of the process and of its log file."""
    role: str
    """Environment whose Python runs it: `serve`, `train` or `agents`."""
    entry: str
    """`package.module:function`; the function takes the configuration as its only argument."""
    config: dict[str, Any]
    """JSON without secrets, which are files of the rendezvous directory."""
    tasks: Literal["all", "first", "others"] = "all"
    """Tasks of the job that run it."""
    restarts: int = 0
    """Crashes after which the job gives up; ten minutes without a crash reset the count."""
    ends_job: bool = False
    """Its clean exit ends the job."""
    uses_gpus: bool = False
    """It computes on its task's GPUs, where `LaunchFile.gpus` names them; others see none."""
    is_forked: bool = False
    """Its starts are forked from a fork server, which has imported the entry's module."""
    is_rank: bool = False
    """Its processes on all tasks are ranks: when one dies, all are started again together."""
    progress: str = ""
    """A file that grows while the work gets further, which cancels crashes too. Empty: none."""


class JobSpec(Struct, frozen=True):
    """One Slurm job: `tasks` copies of a supervisor, each running the processes below."""

    name: str
    role: str
    """Environment whose Python runs the supervisor."""
    processes: list[ProcessSpec]
    tasks: int = 1
    is_task_a_node: bool = False
    """Whether each task gets a node of its own."""
    gpus_per_task: int = 0


class SlurmLaunchInfo(Struct, frozen=True):
    """Facts that a job under Slurm needs."""

    excluded_by_recipe: str = ""
    """Nodes that the recipe excludes for good, in Slurm's notation."""
    interface: str = ""
    """Network interface whose address other nodes use; empty: the address of the host's name."""
    margin_s: float = REQUEUE_MARGIN_S
    """Time kept free before the time limit and before the end of a preemption's grace."""
    progress: str = ""
    """File that grows with the run's progress. A job that crashes is started again as long as the
    file grows. Empty: only the job's lifetime counts."""
    done_marker: str = ""
    """File whose existence means that the job's work is done."""
    least_free_bytes: int = 1 << 30
    """Free space below which a node or the run directory fails the probe."""
    join_timeout_s: float = 120.0
    """Time until a task has started on every node and sees the files of the others."""


class AllocationStepStart(Struct, frozen=True):
    """One start of a job as a step of an allocation, with the heartbeat file of its launcher."""

    incarnation: str
    """Identity of the start, `<job id>.<restart>.<number>`."""
    start_number: int
    """Number of the job's start, from 1, over all launches of the run."""
    heartbeat_path: str
    """File that the launcher keeps rewriting; the job stops when it no longer changes."""
    interface: str = ""
    """Network interface whose address other nodes use; empty: the address of the host's name."""


class LaunchFile(Struct, frozen=True):
    """Input of a job's supervisors: its specification and the facts of this launch."""

    job: JobSpec
    job_dir: str
    """Folder of the process configurations and of the supervisor's outcome."""
    log_dir: str
    events: str
    """The run's event log."""
    pythons: dict[str, str]
    """Interpreter of each role."""
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Extra environment of each role."""
    recipe: str = ""
    """The run's recipe, whose variables of each role override `variables`; empty for none. They
    may be secrets, so no other file repeats them."""
    launcher_lock: str | None = None
    """File whose lock the launcher holds: the job stops when it is released. None for jobs that
    outlive the launcher."""
    umask: int = 0o077
    """Permission bits removed from files that the job makes."""
    stop_grace_s: float = 12.0
    gpus: list[list[str]] | None = None
    """GPUs of each task by rank, as CUDA_VISIBLE_DEVICES spells them; None keeps the environment
    that Slurm made."""
    slurm: SlurmLaunchInfo | None = None
    """None for jobs of a foreground launcher."""
    step: AllocationStepStart | None = None
    """None for jobs that are no step of the launcher's allocation."""

    @property
    def paths(self) -> JobPaths:
        return JobPaths(Path(self.job_dir))

    @property
    def run(self) -> RunPaths:
        return RunPaths(Path(self.events).parent)


def read_launch_file(path: Path) -> LaunchFile:
    return decode_json(path.read_bytes(), LaunchFile)


class TaskExit(Struct, frozen=True):
    """Exit status of one task of a job, left by its supervisor as a file in the job's folder."""

    exit_code: int
    process: str = ""
    """Process whose end decided the exit code."""
    reason: str = ""
    log: str = ""
    incarnation: str = ""
    """Start of the job, `<job id>.<restart>`, followed by the number of a step; empty for jobs of
    this machine."""
    faulty_node: str = ""
    """Node that caused the failure and is excluded from now on."""
    gave_up: bool = False
    """Whether the job decided that another start would not help."""
    says_why: bool = False
    """Whether `reason` is an error of the recipe or the agent that explains itself."""

    @property
    def is_crash(self) -> bool:
        return self.exit_code not in (0, STOPPED_EXIT_CODE, IDLE_EXIT_CODE)

    @property
    def cause(self) -> str:
        if not self.is_crash or self.says_why or not self.log:
            return self.reason
        return f"{self.process} ended with exit code {self.exit_code}"


def write_task_exit(job: JobPaths, rank: int, task_exit: TaskExit) -> None:
    write_atomic(job.task_exit(rank), msgspec.json.encode(task_exit))


def read_task_exit(job: JobPaths, rank: int, incarnation: str) -> TaskExit | None:
    task_exit = _decode_task_exit(job.task_exit(rank))
    return task_exit if task_exit and task_exit.incarnation == incarnation else None


def read_task_exits(job: JobPaths) -> dict[int, TaskExit]:
    exits = ((rank, _decode_task_exit(path)) for rank, path in job.map_task_exit_files().items())
    return {rank: task_exit for rank, task_exit in exits if task_exit is not None}


def _decode_task_exit(path: Path) -> TaskExit | None:
    try:
        return decode_json(path.read_bytes(), TaskExit)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None


class Submission(Struct, frozen=True):
    """One job id that Slurm gave out. A requeue keeps the id and adds no line."""

    job: str
    """Name within the run: `trainer`, `cell-0`, `sft`."""
    job_id: str

    attempt: int
    """Number of the run's attempt, which also names the folder of its logs."""
    submitted_at: float
    """Unix time, seconds."""
    script: str
    """The sbatch script."""
    token: str = ""
    """Token in the job's name and comment; empty for a job that areal_hpc did not submit."""


def record_submission(path: Path, submission: Submission) -> None:

    make_folder(path.parent)
    append_line(path, submission)


def read_submissions(path: Path) -> list[Submission]:
    return read_readable_records(path, Submission)


def get_latest_submissions(submissions: list[Submission]) -> dict[str, Submission]:
    return {submission.job: submission for submission in submissions}


class ExcludedNode(Struct, frozen=True):
    """A node that failed its check, or that never started a job."""

    node: str
    reason: str
    at: float
    """Unix time."""
    job_id: str = ""

    @property
    def is_expired(self) -> bool:
        return time.time() - self.at > EXCLUDED_NODE_LIFETIME_S


def read_excluded_nodes(path: Path) -> list[ExcludedNode]:
    return read_readable_records(path, ExcludedNode)


def list_unexpired_excluded_nodes(path: Path) -> list[str]:
    nodes = read_excluded_nodes(path)
    return list(dict.fromkeys(excluded.node for excluded in nodes if not excluded.is_expired))


def add_excluded_node(path: Path, node: str, reason: str, job_id: str) -> None:
    append_line(path, ExcludedNode(node, reason, round(time.time(), 3), job_id))


_WITHOUT_CHECKPOINT = "without a last checkpoint"


def mark_cancelled(marker_file: Path, *, without_checkpoint: bool = False) -> None:
    """Mark a run as cancelled before its jobs are stopped."""
    marker_file.write_text(_WITHOUT_CHECKPOINT if without_checkpoint else "")


def is_cancelled(marker_file: Path) -> bool:
    """Return whether a run is marked as cancelled; False if the storage does not respond."""
    is_marked = False
    with log_storage_errors():
        is_marked = marker_file.exists()
    return is_marked


def is_cancelled_without_checkpoint(marker_file: Path) -> bool:
    """Return whether a cancelled run's jobs are to end without another checkpoint."""
    content = ""
    with log_storage_errors(), contextlib.suppress(FileNotFoundError):
        content = marker_file.read_text()
    return content == _WITHOUT_CHECKPOINT
