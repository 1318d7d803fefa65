"""Numbered starts of a Slurm job, stop notes between its tasks, and its end of time.

Slurm may start a job again on other nodes while a lost node still runs its old tasks. The first
task of every start takes the next number, as a file. The other tasks read this file first: a task
that cannot see it is on a node without the shared storage.
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
"""Variable with the path of a job's stop note."""


class JobStart(Struct, frozen=True):
    number: int
    """Number of the start, from 1, over requeues and new submissions."""
    incarnation: str
    """`<job id>.<restart>`, the same for all tasks."""
    node: str
    """Node of the first task."""
    address: str = ""
    """`host:port` at which the first task answers for a while; empty if it is alone."""


class StopNote(Struct, frozen=True):
    """Note that makes the tasks of a start stop.

    As clocks of nodes differ, a reader counts the grace from its first look, by its own clock.
    """

    reason: str
    exit_code: int
    """Exit code of the task that wrote it: 0 when the work is done."""
    grace_s: float
    """Seconds until processes that still run are killed."""


def claim_next_start(folder: Path, incarnation: str, node: str, address: str) -> JobStart:
    """Take the next number, in the first task."""
    number = claim_next_number(folder)
    start = JobStart(number, incarnation, node, address)
    write_atomic(get_number_path(folder, number), msgspec.json.encode(start))
    return start


def await_start(folder: Path, incarnation: str, node: str, timeout_s: float) -> JobStart:
    """Wait, in the other tasks, for the first task's file of this start."""
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
    """Wait, in the first task, for the other nodes; return the ranks of nodes without a report."""
    reports = {
        node: get_number_path(folder, start.number, f".node{node}") for node in range(1, nodes)
    }
    give_up_at = time.monotonic() + timeout_s
    while absent := [node for node, report in reports.items() if not report.exists()]:
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
    """Read the stop note of this start; None while there is none."""
    try:
        return decode_json(path.read_bytes(), StopNote)
    except FileNotFoundError:
        return None


def read_own_stop_note() -> StopNote | None:
    path = os.environ.get(STOP_NOTE_VARIABLE)
    return read_stop_note(Path(path)) if path else None


class StopDeadline:
    """Time at which a stopping process is killed, by this node's own clock.

    `grace_s` counts from now, until there is a stop note.
    """

    def __init__(self, grace_s: float) -> None:
        self._kill_at = time.monotonic() + grace_s
        self._notice: StopNote | None = None

    def get_left_s(self) -> float:
        """Return the seconds left. The grace of a new note counts from now."""
        notice = read_own_stop_note()
        if notice is not None and notice != self._notice:
            self._notice, self._kill_at = notice, time.monotonic() + notice.grace_s
        return self._kill_at - time.monotonic()


CHECKPOINT_DURATION_FILE_VARIABLE = "AREAL_HPC_CHECKPOINT_TIME_FILE"
"""Variable with the path of the file of `record_checkpoint_duration`."""


class SlurmControllerClock:
    """Clock of slurmctld, which ends jobs by it; a node's own clock may be off by many seconds.

    The offset is read once; without an answer of slurmctld the node's own clock is used.
    """

    def __init__(self) -> None:
        try:
            now = scontrol.read_controller_time()
        except ClusterError as error:
            log.warning("the time of slurmctld is unknown: %s", error)
            now = None
        self._ahead_s = (time.time() if now is None else now) - time.monotonic()

    def now(self) -> float:
        return self._ahead_s + time.monotonic()


def find_end_time(environ: Mapping[str, str]) -> float | None:
    """Find the time at which Slurm ends this job, by its clock; None without a known limit.

    Newer releases set a variable; older ones are queried once.
    """
    end_time = environ.get("SLURM_JOB_END_TIME", "")
    if end_time.isdecimal():
        return float(end_time)
    try:
        return scontrol.query_job(environ["SLURM_JOB_ID"]).ends_at
    except ClusterError:
        return None


def record_checkpoint_duration(seconds: float) -> None:
    """Record, in a supervised process, the duration of its last save; errors are only logged."""
    if path := os.environ.get(CHECKPOINT_DURATION_FILE_VARIABLE):
        try:
            write_atomic(Path(path), f"{seconds:.3f}".encode())
        except OSError as error:
            log.warning("the duration of the last save cannot be written: %s", error)


def read_checkpoint_duration_s(job: JobPaths) -> float:
    """Read the duration of the job's last save in seconds; 0 before the first, or if unreadable.

    Jobs must stop even while the storage has an outage.
    """
    try:
        return float(job.checkpoint_duration.read_text())
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError) as error:
        log.warning("the duration of the last save cannot be read: %s", error)
        return 0.0
