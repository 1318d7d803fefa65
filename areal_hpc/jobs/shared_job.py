"""Cells that share a job: which task works for which cell, and when one of them is over.

The tasks of a cell learn of its end from one another's exit files, and so does the first task of
the job, which ends the job when no cell is left.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node.topology import JOB_START_VARIABLE, TaskPosition
from areal_hpc.jobs.restart_policy import SLURM_JOB_RESTART_POLICY, RestartDecision
from areal_hpc.jobs.starts import claim_next_start
from areal_hpc.rundir.jobs import (
    JobSpec,
    LaunchFile,
    ProcessSpec,
    SlurmLaunchInfo,
    TaskExit,
    read_task_exit,
    write_task_exit,
)
from areal_hpc.rundir.paths import JobPaths

log = logging.getLogger(__name__)

CELL_POLL_S = 2.0
"""Between two looks at the exit files of other tasks."""
IDLE_NOTE_MARGIN_S = 120.0
"""Start of a driver, which comes on top of the time between two idle notes of a cell."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """The part of a job that a task works for: a cell, or the whole job."""

    name: str
    processes: Sequence[ProcessSpec]
    position: TaskPosition
    """Among the tasks of this part."""

    def list_processes_of_task(self) -> list[ProcessSpec]:
        own = ("all", "first" if self.position.is_first else "others")
        return [spec for spec in self.processes if spec.tasks in own]


def get_part_outside_cells(job: JobSpec, position: TaskPosition) -> JobPart:
    return JobPart(job.name, job.processes, position)


def get_part_of_task(job: JobSpec, position: TaskPosition) -> JobPart:
    """The cell that a task of a shared job works for; the whole of any other job."""
    if not job.cells:
        return get_part_outside_cells(job, position)
    tasks = job.tasks_per_cell
    number, rank = divmod(position.rank, tasks)
    cell = job.cells[number]
    # A task a node: places among nodes are those among tasks.
    return JobPart(cell.name, cell.processes, TaskPosition(rank, tasks, position.local_rank, rank))


def split_exits_by_cell(job: JobSpec, exits: Mapping[int, TaskExit]) -> list[list[TaskExit]]:
    """Exit statuses of the tasks, by rank, cell by cell; all together if the job is not shared."""
    if not job.cells:
        return [list(exits.values())]
    ranks = _list_ranks_by_cell(job)
    return [[exits[rank] for rank in own if rank in exits] for own in ranks]


def _list_ranks_by_cell(job: JobSpec) -> list[range]:
    tasks = job.tasks_per_cell
    return [range(first, first + tasks) for first in range(0, job.tasks, tasks)]


class SharedCell:
    """The cell that a task works for, in a job that several cells share."""

    def __init__(
        self, launch: LaunchFile, slurm: SlurmLaunchInfo, position: TaskPosition, incarnation: str
    ) -> None:
        self._job = launch.job
        self._paths = launch.paths
        self._slurm = slurm
        self._rank = position.rank
        self._incarnation = incarnation
        self._cell_ranks = _list_ranks_by_cell(launch.job)
        self._number = position.rank // launch.job.tasks_per_cell
        self.name = launch.job.cells[self._number].name
        self.failures = 0
        """Ends of the cell in a row without progress of the run."""
        self.end: TaskExit | None = None
        """How it ended for good; None while it works."""
        self._is_end_reported = False
        self._next_look_at = 0.0
        self._started_at, self._started_bytes = 0.0, 0
        self.mark_started()

    def mark_started(self) -> None:
        self._started_at, self._started_bytes = time.monotonic(), self._read_progress_bytes()

    def claim_start_and_build_variables(self, node: str) -> Mapping[str, str]:
        """Number this start of the cell, and what tells its processes so.

        Numbers of the job would begin anew when its cells are shared out among jobs differently,
        and the ledger would listen to a driver that a lost node still runs.

        Raises:
            ClusterError: The shared storage refused it.
        """
        if self._rank != self._cell_ranks[self._number][0]:
            return {}
        folder = JobPaths(self._paths.root.parent / self.name).starts_dir
        try:
            start = claim_next_start(folder, self._incarnation, node, "")
        except OSError as error:
            raise ClusterError(
                f"the start of {self.name} could not be numbered: {error.strerror}",
                key=str(folder),
                hint="check free space, quota and permissions",
            ) from error
        return {JOB_START_VARIABLE: str(start.number)}

    def _read_progress_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return Path(self._slurm.progress).stat().st_size if self._slurm.progress else 0
        return 0

    def count_failure_and_decide_restart(self, outcome: TaskExit) -> RestartDecision:
        """Decision about a task one of whose processes failed for good: the same as about a job."""
        made_progress = (
            self._read_progress_bytes() > self._started_bytes
            or time.monotonic() - self._started_at >= SLURM_JOB_RESTART_POLICY.healthy_s
        )
        self.failures = SLURM_JOB_RESTART_POLICY.count_failures(
            self.failures, made_progress=made_progress
        )
        return SLURM_JOB_RESTART_POLICY.decide([outcome.exit_code], self.failures)

    def report_cell_end(self, outcome: TaskExit) -> None:
        self.end = self.choose_reported_exit(outcome)
        self._write_end_if_unreported()

    def _write_end_if_unreported(self) -> None:
        if self.end is None or self._is_end_reported:
            return
        try:
            write_task_exit(self._paths, self._rank, self.end)
            self._is_end_reported = True
        except OSError as error:  # tried again at the next look
            log.error("the end of %s could not be written: %s", self.name, error)

    def choose_reported_exit(self, outcome: TaskExit) -> TaskExit:
        if self.end is not None and outcome.exit_code != 0:
            return self.end
        return msgspec.structs.replace(outcome, cell=self.name, incarnation=self._incarnation)

    def poll_end_of_other_task(self) -> TaskExit | None:
        """How another task of this cell ended for good; None while all work."""
        others = [rank for rank in self._cell_ranks[self._number] if rank != self._rank]
        if not others or not self._claim_due_poll():
            return None
        return next(filter(None, map(self._read_exit, others)), None)

    def write_own_end_and_check_job_over(self) -> bool:
        """True once no cell of the job is left. Only the job's first task looks."""
        if self.end is None or not self._claim_due_poll():
            return False
        self._write_end_if_unreported()
        return self._rank == 0 and all(self._read_exit(ranks[0]) for ranks in self._cell_ranks)

    def report_idle_and_check_all_idle(self) -> bool:
        """Say that the cell has nothing to do; true if no cell of the job has.

        A driver that finds no trainer ends and is started again, so a cell without a trainer says
        this again and again: what it said before the last such time no longer counts.
        """
        own = JobPaths(self._paths.root.parent / self.name).idle_note
        try:
            own.parent.mkdir(exist_ok=True)
            own.write_text(self._incarnation)
            oldest = own.stat().st_mtime - self._slurm.idle_timeout_s - IDLE_NOTE_MARGIN_S
            return all(
                self._is_cell_over_or_idle(number, oldest)
                for number in range(len(self._cell_ranks))
            )
        except OSError as error:
            log.warning("shared storage does not respond: %s", error)
            return False

    def _is_cell_over_or_idle(self, cell_index: int, since: float) -> bool:
        if self._read_exit(self._cell_ranks[cell_index][0]):
            return True
        note = JobPaths(self._paths.root.parent / self._job.cells[cell_index].name).idle_note
        with contextlib.suppress(FileNotFoundError):
            return note.read_text() == self._incarnation and note.stat().st_mtime >= since
        return False

    def _read_exit(self, rank: int) -> TaskExit | None:
        return read_task_exit(self._paths, rank, self._incarnation)

    def _claim_due_poll(self) -> bool:
        now = time.monotonic()
        if now < self._next_look_at:
            return False
        self._next_look_at = now + CELL_POLL_S
        return True
