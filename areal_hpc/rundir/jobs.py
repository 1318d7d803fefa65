"""Files under `jobs/`: specifications, launches, exits, submissions; a run's CANCELLED."""

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
"""The task was told to stop: neither success nor failure."""
REQUEUE_MARGIN_S = 10.0
"""Time that asking Slurm for another start may take."""
IDLE_EXIT_CODE = IdleError.exit_code
"""A process found nothing to do for too long: its job ends until it is wanted."""
CARETAKER_JOB = "caretaker"
"""The job that waits until all others of its run have ended, to submit those that come back."""
LOST_RANK_EXIT_CODE = LostTrainerRankError.exit_code
"""A rank ended because another one had vanished. That one's end is the cause."""
EXCLUDED_NODE_LIFETIME_S = 86400.0
"""Time for which a node that failed its check is not given to the run again."""


class ProcessSpec(Struct, frozen=True):
    """One process of a job, started by the job's supervisor on its node."""

    name: str
    """Also the name of its log file."""
    role: str
    """Which environment's Python runs it: `serve`, `train` or `agents`."""
    entry: str
    """`package.module:function`; the function takes the configuration as its only argument."""
    config: dict[str, Any]
    """JSON; no secrets, which live in the rendezvous directory."""
    tasks: Literal["all", "first", "others"] = "all"
    """Which of the job's tasks run it."""
    restarts: int = 0
    """Crashes after which the job gives up; ten minutes without one cancel them."""
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
    """Which environment's Python runs the supervisor."""
    processes: list[ProcessSpec]
    tasks: int = 1
    is_task_a_node: bool = False
    """No two tasks on one node."""
    gpus_per_task: int = 0
    """GPUs that each task needs."""


class SlurmLaunchInfo(Struct, frozen=True):
    """Facts that a job under Slurm needs."""

    excluded_by_recipe: str = ""
    """Nodes that the recipe excludes, in Slurm's notation: for good, unlike those that failed."""
    interface: str = ""
    """Network interface whose address other nodes use; empty: where the host's name leads."""
    margin_s: float = REQUEUE_MARGIN_S
    """Kept free before the end of the time limit and of a preemption's grace."""
    progress: str = ""
    """A file that grows while the run gets further: a job that crashes is started again for as
    long as it does. Empty: only the time that the job lived counts."""
    done_marker: str = ""
    """When this file exists there is nothing left for the job to do."""
    least_free_bytes: int = 1 << 30
    """A node or run directory with less space than this fails the probe."""
    join_timeout_s: float = 120.0
    """Within this a task has started on every node, and each sees what the others wrote."""


class AllocationStepStart(Struct, frozen=True):
    """One start of a job as a step of an allocation, and the file that shows its launcher alive."""

    incarnation: str
    """Which start of the job this is: `<job id>.<restart>.<number>`."""
    start_number: int
    """Of the job, from 1, over all launches of the run."""
    heartbeat_path: str
    """A file that the launcher writes again and again: without a change the job stops."""
    interface: str = ""
    """Network interface whose address other nodes use; empty: where the host's name leads."""


class LaunchFile(Struct, frozen=True):
    """A job as it is handed to its supervisors: the spec plus what this launch adds."""

    job: JobSpec
    job_dir: str
    """Where the supervisor leaves process configurations and its outcome."""
    log_dir: str
    events: str
    """The run's event log."""
    pythons: dict[str, str]
    """Interpreter of each role."""
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Extra environment of each role."""
    recipe: str = ""
    """The run's recipe, whose variables of each role win over those; empty for none. They may be
    secrets, which are written there alone."""
    launcher_lock: str | None = None
    """The job stops when this file's lock is released; None for jobs that outlive the launcher."""
    umask: int = 0o077
    """What files that the job makes do not allow (`rundir.folders`)."""
    stop_grace_s: float = 12.0
    gpus: list[list[str]] | None = None
    """GPUs of each task, by rank, as CUDA_VISIBLE_DEVICES spells them; None leaves what the
    environment of the job says, as Slurm made it."""
    slurm: SlurmLaunchInfo | None = None
    """None for jobs of a foreground launcher."""
    step: AllocationStepStart | None = None
    """None for jobs that are no step of an allocation that the launcher runs in."""

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
    """The process whose end decided it."""
    reason: str = ""
    log: str = ""
    incarnation: str = ""
    """Which start of the job says so, `<job id>.<restart>`, and behind it the number of a step;
    empty for jobs of this machine."""
    faulty_node: str = ""
    """The node that is to blame, and is not to be given again."""
    gave_up: bool = False
    """The job decided that another start would not help."""
    says_why: bool = False
    """`reason` is an error of the recipe's or the agent's, in words that need no others."""

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
    found = ((rank, _decode_task_exit(path)) for rank, path in job.map_task_exit_files().items())
    return {rank: task_exit for rank, task_exit in found if task_exit is not None}


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
    """Slurm's."""
    attempt: int
    """The run's attempt, which also names the folder of its logs."""
    submitted_at: float
    """Unix time, seconds."""
    script: str
    """The sbatch script."""
    token: str = ""
    """In the job's name and comment; empty for one that was not submitted by areal_hpc."""


def record_submission(path: Path, submission: Submission) -> None:
    """Append one line, whole or not at all."""
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
    """Names of the nodes that the run must not get now."""
    return list(dict.fromkeys(one.node for one in read_excluded_nodes(path) if not one.is_expired))


def add_excluded_node(path: Path, node: str, reason: str, job_id: str) -> None:
    append_line(path, ExcludedNode(node, reason, round(time.time(), 3), job_id))


_WITHOUT_CHECKPOINT = "without a last checkpoint"


def mark_cancelled(marker_file: Path, *, without_checkpoint: bool = False) -> None:
    """Mark a run as cancelled, before its jobs are told to stop."""
    marker_file.write_text(_WITHOUT_CHECKPOINT if without_checkpoint else "")


def is_cancelled(marker_file: Path) -> bool:
    """True if a run is marked so. A storage that does not respond keeps no job from going on."""
    is_marked = False
    with log_storage_errors():
        is_marked = marker_file.exists()
    return is_marked


def is_cancelled_without_checkpoint(marker_file: Path) -> bool:
    """True if a run is marked so, and its jobs are to end without another checkpoint."""
    content = ""
    with log_storage_errors(), contextlib.suppress(FileNotFoundError):
        content = marker_file.read_text()
    return content == _WITHOUT_CHECKPOINT
