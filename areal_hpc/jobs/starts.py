"""Numbered starts of a Slurm job, stop notices between its tasks, and when its time is up.

Slurm starts a job again on other nodes while a lost node may still run its old tasks. The first
task of every start takes the next number, in a file whose content is also the first thing that the
other tasks read from the shared storage: who does not see it is on a node that does not share it.
"""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.files import (
    claim_next_number,
    get_number_path,
    read_newest_number,
    write_atomic,
)
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm import scontrol
from areal_hpc.wire.decoding import decode_json

log = logging.getLogger(__name__)

_POLL_S = 0.25
STOP_NOTE_VARIABLE = "AREAL_HPC_STOP_NOTICE_FILE"
"""Variable that names the note of a job's stop."""


class JobStart(Struct, frozen=True):
    number: int
    """From 1, over requeues and new submissions."""
    incarnation: str
    """`<job id>.<restart>`: the same for all tasks."""
    node: str
    """The first task's."""
    address: str = ""
    """`host:port` where the first task can be reached for a while; empty if it is alone."""


class StopNote(Struct, frozen=True):
    """Why the tasks of a start have to stop, and how soon.

    Whoever reads it counts from then on by its own clock: clocks of nodes differ.
    """

    reason: str
    exit_code: int
    """Exit code of the task that says so: 0 when the work is done."""
    grace_s: float
    """Seconds until processes that still run are killed."""


def claim_next_start(folder: Path, incarnation: str, node: str, address: str) -> JobStart:
    """Take the next number. For the first task."""
    number = claim_next_number(folder)
    start = JobStart(number, incarnation, node, address)
    write_atomic(get_number_path(folder, number), msgspec.json.encode(start))
    return start


def await_start(folder: Path, incarnation: str, node: str, timeout_s: float) -> JobStart:
    """Wait for what the first task of this start wrote. For the other tasks."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        number = read_newest_number(folder)
        content = get_number_path(folder, number).read_bytes() if number else b""
        if content:  # it is empty for a moment
            start = decode_json(content, JobStart)
            if start.incarnation == incarnation:
                return start
        time.sleep(_POLL_S)
    raise ClusterError(
        f"{node} does not see the file of the first task after {timeout_s:.0f} s",
        key=str(folder),
        hint="check that this file system is mounted there",
    )


def report_node_joined(folder: Path, start: JobStart, node_rank: int) -> None:
    get_number_path(folder, start.number, f".node{node_rank}").touch()


def await_absent_nodes(folder: Path, start: JobStart, nodes: int, timeout_s: float) -> list[int]:
    """Wait for the other nodes; places in the job's list of those without report. For the first."""
    reports = {one: get_number_path(folder, start.number, f".node{one}") for one in range(1, nodes)}
    give_up_at = time.monotonic() + timeout_s
    while absent := [one for one, report in reports.items() if not report.exists()]:
        if time.monotonic() >= give_up_at:
            return absent
        time.sleep(_POLL_S)
    for report in reports.values():
        report.unlink()
    return []


def is_superseded(folder: Path, start: JobStart) -> bool:
    return get_number_path(folder, start.number + 1).exists()


def get_stop_note_path(folder: Path, start: JobStart) -> Path:
    return get_number_path(folder, start.number, ".stop")


def write_stop_note(path: Path, note: StopNote) -> None:
    write_atomic(path, msgspec.json.encode(note))


def read_stop_note(path: Path) -> StopNote | None:
    """Stop note of a task of this start; None while all go on."""
    try:
        return decode_json(path.read_bytes(), StopNote)
    except FileNotFoundError:
        return None


def read_own_stop_note() -> StopNote | None:
    path = os.environ.get(STOP_NOTE_VARIABLE)
    return read_stop_note(Path(path)) if path else None


class StopDeadline:
    """Moment at which a process that was told to stop is killed, by this node's own clock.

    `grace_s` counts from now, and until there is a note of the stop.
    """

    def __init__(self, grace_s: float) -> None:
        self._kill_at = time.monotonic() + grace_s
        self._notice: StopNote | None = None

    def get_left_s(self) -> float:
        """Seconds until then. A note that is new counts from now."""
        notice = read_own_stop_note()
        if notice is not None and notice != self._notice:
            self._notice, self._kill_at = notice, time.monotonic() + notice.grace_s
        return self._kill_at - time.monotonic()


CHECKPOINT_DURATION_FILE_VARIABLE = "AREAL_HPC_CHECKPOINT_TIME_FILE"
"""Variable that names the file for `record_checkpoint_duration`."""


class SlurmControllerClock:
    """slurmctld's clock, by which it ends jobs: a node's own may be off by many seconds.

    It is asked once, as this is made; if it does not answer the node's own clock must do.
    """

    def __init__(self) -> None:
        try:
            now = scontrol.read_controller_time()
        except ClusterError as error:
            log.warning("slurmctld did not tell the time: %s", error)
            now = None
        self._ahead_s = (time.time() if now is None else now) - time.monotonic()

    def now(self) -> float:
        return self._ahead_s + time.monotonic()


def find_end_time(environ: Mapping[str, str]) -> float | None:
    """Time at which Slurm ends this job, by its clock; None if there is no limit or none is known.

    Newer Slurms tell every job; others are asked, once.
    """
    told = environ.get("SLURM_JOB_END_TIME", "")
    if told.isdecimal():
        return float(told)
    try:
        return scontrol.query_job(environ["SLURM_JOB_ID"]).ends_at
    except ClusterError:
        return None


def record_checkpoint_duration(seconds: float) -> None:
    """For a process of a job: say how long its last save took. Without a supervisor: nothing.

    Nothing ends for want of it: the time of the save before still stands.
    """
    if path := os.environ.get(CHECKPOINT_DURATION_FILE_VARIABLE):
        try:
            write_atomic(Path(path), f"{seconds:.3f}".encode())
        except OSError as error:
            log.warning("how long the last save took cannot be written: %s", error)


def read_checkpoint_duration_s(job: JobPaths) -> float:
    """Seconds that the job's last save took; 0 before the first, and where nobody can tell.

    Jobs are stopped even while the storage is away.
    """
    try:
        return float(job.checkpoint_duration.read_text())
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError) as error:
        log.warning("how long the last save took cannot be read: %s", error)
        return 0.0
