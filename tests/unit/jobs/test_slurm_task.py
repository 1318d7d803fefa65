"""A task under Slurm that stops: how much time its processes get, and what it needs for that."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

from areal_hpc.jobs.node.topology import TaskPosition
from areal_hpc.jobs.slurm_task import SlurmTask
from areal_hpc.rundir.jobs import (
    STOPPED_EXIT_CODE,
    JobSpec,
    LaunchFile,
    TaskExit,
    read_task_exits,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventLog
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.slurm_launch import build_slurm_launch_info

GRACE_S, SAVE_S = 0.2, 60.0
STOPPED = TaskExit(STOPPED_EXIT_CODE, reason="stopped by a signal")
REQUEUE = "requeue) echo PENDING > $STATE"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    told = {"JOB_ID": "7", "NNODES": "1", "JOB_NODELIST": "n01", "JOB_END_TIME": ""}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n01")
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    slurm.answer_about_jobs(REQUEUE)
    return slurm


def begin_task(paths: RunPaths, tasks: int = 1) -> SlurmTask:
    """The first task of a trainer that has begun."""
    task = make_task(paths, tasks)
    assert task.take_part_in_start_or_get_refusal() is None
    return task


def make_task(paths: RunPaths, tasks: int = 1) -> SlurmTask:
    """The first task of a trainer that is about to begin."""
    files = paths.job("trainer")
    files.root.mkdir(parents=True)
    told = build_slurm_launch_info(paths, "trainer", margin_s=0.5, least_free_bytes=1)
    job = JobSpec("trainer", "train", [], tasks=tasks)
    launch = LaunchFile(
        *(job, str(files.root), "", str(paths.events), {"train": sys.executable}),
        stop_grace_s=GRACE_S,
        slurm=told,
    )
    position = TaskPosition(0, tasks, 0, 0)
    return SlurmTask(launch, told, position, EventLog(paths.events, "trainer"))


def test_a_job_without_a_time_limit_has_time_for_a_save(
    slurm: ScriptedSlurm, paths: RunPaths
) -> None:
    task = begin_task(paths)
    paths.job("trainer").checkpoint_time.write_text(f"{SAVE_S:.3f}")
    assert task.announce_stop_and_decide_grace_s(STOPPED) == GRACE_S + SAVE_S
    slurm.state = "COMPLETING"
    assert task.announce_stop_and_decide_grace_s(STOPPED) == GRACE_S, "Slurm is ending it"


def test_a_storage_without_an_answer_keeps_no_task_from_its_stop_and_no_job_from_its_requeue(
    slurm: ScriptedSlurm, paths: RunPaths
) -> None:
    """A folder in the place of a file is an error to read, as a stale handle is."""
    task, files = begin_task(paths, tasks=2), paths.job("trainer")
    for path in (files.checkpoint_time, files.failure_count, files.task_exit(1)):
        path.mkdir()
    paths.excluded_nodes.mkdir()
    assert task.announce_stop_and_decide_grace_s(STOPPED) == GRACE_S
    outcome = task.report_exit_and_conclude_job(STOPPED)
    assert outcome.reason == "stopped by a signal (requeued)"
    assert slurm.list_calls("scontrol requeue") == ["scontrol requeue 7"]
    files.task_exit(1).rmdir()
    assert read_task_exits(files)[0] == msgspec.structs.replace(outcome, incarnation="7.0")


def test_a_storage_that_takes_no_files_as_a_job_starts_keeps_it_from_no_other_start(
    slurm: ScriptedSlurm, paths: RunPaths
) -> None:
    """A file in the place of a folder is an error to write, as a full disk is."""
    task, files = make_task(paths, tasks=2), paths.job("trainer")
    files.starts_dir.touch()
    refusal = task.take_part_in_start_or_get_refusal()
    assert refusal is not None
    assert task.announce_stop_and_decide_grace_s(refusal) == GRACE_S
    outcome = task.report_exit_and_conclude_job(refusal)
    assert outcome.reason.endswith("(requeued)")
    assert slurm.list_calls("scontrol requeue") == ["scontrol requeue 7"]
    assert read_task_exits(files)[0] == outcome
