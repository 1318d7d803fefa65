"""When a step of an allocation stops by itself."""

from pathlib import Path

import pytest

from areal_hpc.jobs import starts
from areal_hpc.jobs.node import TaskPosition
from areal_hpc.jobs.supervisor import HEARTBEAT_POLL_S, LocalTask
from areal_hpc.rundir.jobs import (
    STOPPED_EXIT_CODE,
    AllocationStepStart,
    JobSpec,
    LaunchFile,
    TaskExit,
    read_task_exits,
)
from areal_hpc.rundir.lock import LAUNCHER_HEARTBEAT_TIMEOUT_S


class Step:
    """A task of a step, and the clock it looks at."""

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
    said = starts.read_stop_note(note)
    assert said is not None
    assert said.grace_s == 42.0
    step.task.conclude(outcome)
    assert read_task_exits(step.launch.paths)[0].incarnation == "12.1"
