"""Stop of a task under Slurm: the time that its processes get, and storage that fails."""

import os
import sys
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from areal_hpc.jobs import slurm_task, starts
from areal_hpc.jobs.node import TaskPosition
from areal_hpc.jobs.slurm_task import SlurmTask
from areal_hpc.jobs.supervisor import HEARTBEAT_POLL_S, LocalTask
from areal_hpc.rundir.jobs import (
    STOPPED_EXIT_CODE,
    AllocationStepStart,
    JobSpec,
    LaunchFile,
    SlurmLaunchInfo,
    TaskExit,
    read_task_exits,
    write_task_exit,
)
from areal_hpc.rundir.lock import LAUNCHER_HEARTBEAT_TIMEOUT_S
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventLog
from tests.support.deadlines import scaled
from tests.support.scripted_slurm import ScriptedSlurm

GRACE_S, SAVE_S = 0.2, 60.0
STOPPED = TaskExit(STOPPED_EXIT_CODE, reason="stopped by a signal")
REQUEUE = "requeue) echo PENDING > $STATE"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    variables = {"JOB_ID": "7", "NNODES": "1", "JOB_NODELIST": "n01", "JOB_END_TIME": ""}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n01")
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    slurm.answer_about_jobs(REQUEUE)
    return slurm


def begin_task(paths: RunPaths, tasks: int = 1) -> SlurmTask:
    """Make the first task of a trainer, which has begun."""
    task = make_task(paths, tasks)
    assert task.begin() is None
    return task


def make_task(paths: RunPaths, tasks: int = 1, rank: int = 0) -> SlurmTask:
    """Make a task of a trainer on one node, which has not begun."""
    files = paths.job("trainer")
    files.root.mkdir(parents=True, exist_ok=True)
    info = SlurmLaunchInfo(margin_s=0.5, least_free_bytes=1)
    job = JobSpec("trainer", "train", [], tasks=tasks)
    launch = LaunchFile(
        *(job, str(files.root), "", str(paths.events), {"train": sys.executable}),
        stop_grace_s=GRACE_S,
        slurm=info,
    )
    position = TaskPosition(rank, tasks, rank, 0)
    return SlurmTask(launch, info, position, EventLog(paths.events, "trainer"))


def test_without_a_time_limit_there_is_time_to_save(slurm: ScriptedSlurm, paths: RunPaths) -> None:
    task = begin_task(paths)
    paths.job("trainer").checkpoint_duration.write_text(f"{SAVE_S:.3f}")
    assert task.announce_stop(STOPPED) == GRACE_S + SAVE_S
    slurm.state = "COMPLETING"
    assert task.announce_stop(STOPPED) == GRACE_S, "Slurm is ending it"


def test_silent_storage_keeps_no_task_from_its_stop(slurm: ScriptedSlurm, paths: RunPaths) -> None:
    """A folder in the place of a file is an error to read, as a stale handle is."""
    task, files = begin_task(paths, tasks=2), paths.job("trainer")
    for path in (files.checkpoint_duration, files.failure_count, files.task_exit(1)):
        path.mkdir()
    paths.excluded_nodes.mkdir()
    assert task.announce_stop(STOPPED) == GRACE_S
    outcome = task.conclude(STOPPED)
    assert outcome.reason == "stopped by a signal (requeued)"
    assert slurm.list_calls("scontrol requeue") == ["scontrol requeue 7"]
    files.task_exit(1).rmdir()
    assert read_task_exits(files)[0] == msgspec.structs.replace(outcome, incarnation="7.0")


def test_full_storage_keeps_a_job_from_no_start(slurm: ScriptedSlurm, paths: RunPaths) -> None:
    """A file in the place of a folder is an error to write, as a full disk is."""
    task, files = make_task(paths, tasks=2), paths.job("trainer")
    files.starts_dir.touch()
    refusal = task.begin()
    assert refusal is not None
    assert task.announce_stop(refusal) == GRACE_S
    outcome = task.conclude(refusal)
    assert outcome.reason.endswith("(requeued)")
    assert slurm.list_calls("scontrol requeue") == ["scontrol requeue 7"]
    assert read_task_exits(files)[0] == outcome


@pytest.mark.parametrize("says_how_it_ended", [False, True], ids=["is silent", "asks Slurm"])
def test_tasks_stay_as_long_as_the_first_asks_slurm(
    slurm: ScriptedSlurm, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, says_how_it_ended: bool
) -> None:
    """Another task's end may end the job before the first task has Slurm's answer."""
    monkeypatch.setattr(slurm_task, "TASK_EXIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(slurm_task, "REQUEUE_TIMEOUT_S", scaled(600.0))
    begin_task(paths, tasks=2)
    files = paths.job("trainer")
    second = make_task(paths, tasks=2, rank=1)
    assert second.begin() is None
    if says_how_it_ended:
        write_task_exit(files, 0, msgspec.structs.replace(STOPPED, incarnation="7.0"))
    ending = Thread(target=second.conclude, args=(STOPPED,))
    ending.start()
    ending.join(2.0 if says_how_it_ended else scaled(60.0))
    assert ending.is_alive() is says_how_it_ended
    Path(second.build_environment()[starts.STOP_NOTE_VARIABLE]).with_suffix(".left").touch()
    ending.join(scaled(60.0))
    assert not ending.is_alive()


class Step:
    """Task of a step, with its clock."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("areal_hpc.jobs.supervisor.time.monotonic", lambda: self.now)
        self.heartbeat = root / "allocation.json"
        self.heartbeat.write_text("1")
        folder = root / "cell-0"
        folder.mkdir()
        self.launch = LaunchFile(
            JobSpec("cell-0", "agents", []), str(folder), "", "", {},
            stop_grace_s=12.0,
            step=AllocationStepStart("12.1", 1, str(self.heartbeat)),
        )  # fmt: skip
        starts.claim_next_start(self.launch.paths.starts_dir, "12", "n1", "")
        self.task = LocalTask(self.launch, TaskPosition(0, 1, 0, 0))

    def look_after(self, seconds: float) -> TaskExit | None:
        self.now += seconds
        return self.task.find_stop_reason(can_end_job=False)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    return Step(tmp_path, monkeypatch)


def test_it_goes_on_while_the_launcher_beats_and_stops_once_it_is_silent(step: Step) -> None:
    for beat in range(5):
        step.heartbeat.write_text(f"beat {beat}")
        assert step.look_after(LAUNCHER_HEARTBEAT_TIMEOUT_S - HEARTBEAT_POLL_S) is None
    outcome = step.look_after(LAUNCHER_HEARTBEAT_TIMEOUT_S)
    assert outcome is not None
    assert (outcome.exit_code, outcome.reason) == (STOPPED_EXIT_CODE, "the launcher is gone")


def test_it_stops_when_the_launcher_took_its_note_away(step: Step) -> None:
    assert step.look_after(HEARTBEAT_POLL_S) is None
    step.heartbeat.unlink()
    assert step.look_after(HEARTBEAT_POLL_S) is None
    outcome = step.look_after(LAUNCHER_HEARTBEAT_TIMEOUT_S)
    assert outcome is not None
    assert outcome.reason == "the launcher is gone"


def test_a_later_start_takes_its_place_and_its_files(step: Step) -> None:
    starts.claim_next_start(step.launch.paths.starts_dir, "12", "n2", "")
    outcome = step.look_after(HEARTBEAT_POLL_S)
    assert outcome is not None
    assert "superseded" in outcome.reason
    step.task.conclude(outcome)
    assert read_task_exits(step.launch.paths) == {}


def test_who_stops_has_time_for_a_save_and_tells_the_processes(step: Step) -> None:
    step.launch.paths.checkpoint_duration.write_text("30.0")
    outcome = TaskExit(STOPPED_EXIT_CODE, reason="x")
    assert step.task.announce_stop(outcome) == 42.0
    [note] = step.launch.paths.starts_dir.glob("*.stop")
    stop = starts.read_stop_note(note)
    assert stop is not None
    assert stop.grace_s == 42.0
    step.task.conclude(outcome)
    assert read_task_exits(step.launch.paths)[0].incarnation == "12.1"
