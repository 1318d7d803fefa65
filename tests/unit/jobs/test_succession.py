"""When a successor that starts leaves the place of its job empty."""

import sys
from pathlib import Path

import pytest

from areal_hpc.jobs.succession import find_reason_not_to_take_over, was_probably_cancelled_by_person
from areal_hpc.rundir.jobs import (
    JobSpec,
    LaunchFile,
    TaskExit,
    write_task_exit,
)
from areal_hpc.rundir.paths import ROLES, RunPaths
from areal_hpc.slurm.queue import QueuePoller, SlurmJobRecord
from areal_hpc.slurm.states import parse_state
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.slurm_launch import build_slurm_launch_info


@pytest.fixture
def launch(tmp_path: Path) -> LaunchFile:
    paths = RunPaths(tmp_path)
    paths.job("trainer").root.mkdir(parents=True)
    done = str(tmp_path / "sft_is_done")
    slurm = build_slurm_launch_info(paths, "trainer", script="job.sbatch", prerequisite=done)
    return LaunchFile(
        job=JobSpec("trainer", "train", []),
        job_dir=str(paths.job("trainer").root),
        log_dir=str(paths.log_dir(1)),
        events=str(paths.events),
        pythons=dict.fromkeys(ROLES, sys.executable),
        slurm=slurm,
    )


def test_a_successor_starts_after_the_stage_before_and_no_decision(launch: LaunchFile) -> None:
    assert launch.slurm is not None
    reason = find_reason_not_to_take_over(launch, launch.slurm)
    assert reason == "the stage before this one did not end well"
    Path(launch.slurm.prerequisite).touch()
    assert find_reason_not_to_take_over(launch, launch.slurm) == ""
    write_task_exit(launch.paths, 0, TaskExit(139, reason="crashed"))
    assert find_reason_not_to_take_over(launch, launch.slurm) == ""
    write_task_exit(launch.paths, 0, TaskExit(78, reason="no such key", gave_up=True))
    assert find_reason_not_to_take_over(launch, launch.slurm) == "trainer gave up: no such key"


def test_a_successor_does_not_start_in_a_run_that_was_cancelled(launch: LaunchFile) -> None:
    assert launch.slurm is not None
    Path(launch.slurm.prerequisite).touch()
    Path(launch.slurm.cancelled).touch()
    assert find_reason_not_to_take_over(launch, launch.slurm) == "the run was cancelled"


ROOT, SLURM, OWNER, COLLEAGUE = 0, 64030, 1001, 1002


@pytest.mark.parametrize(
    ("by", "owner", "is_by_person"),
    [
        (OWNER, OWNER, True),
        (COLLEAGUE, OWNER, True),
        (ROOT, ROOT, True),
        (ROOT, OWNER, False),
        (SLURM, OWNER, False),
        (SLURM, SLURM, True),
    ],
)
def test_an_administrator_who_cancels_another_users_job_wants_its_nodes_and_not_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: int, owner: int, is_by_person: bool
) -> None:
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.answer("sacct", f"echo '7|CANCELLED by {by}|0:15|n04|Unknown|Unknown|None'")
    slurm.answer("scontrol", f"echo 'SlurmUser               = slurm({SLURM})'")
    job = SlurmJobRecord("7", parse_state("CANCELLED"))
    assert was_probably_cancelled_by_person(job, QueuePoller(), owner) is is_by_person


@pytest.mark.parametrize(("state", "is_by_person"), [("CANCELLED", False), ("RUNNING", True)])
def test_of_what_slurm_cancels_by_itself_accounting_names_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_by_person: bool
) -> None:
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.answer("sacct", f"echo '7|{state}|0:0|None assigned|Unknown|Unknown|None'")
    job = SlurmJobRecord("7", parse_state("CANCELLED"))
    assert was_probably_cancelled_by_person(job, QueuePoller(), OWNER) is is_by_person


def test_without_accounting_every_cancellation_is_a_persons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ScriptedSlurm(tmp_path, monkeypatch).answer("sacct", "exit 1")
    job = SlurmJobRecord("7", parse_state("CANCELLED"))
    assert was_probably_cancelled_by_person(job, QueuePoller(), OWNER)
    assert not was_probably_cancelled_by_person(
        SlurmJobRecord("7", parse_state("FAILED")), QueuePoller(), OWNER
    )
