"""What `status` and `why` say of the situations that a run gets into: word, cause, exit code."""

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rundir.jobs import CARETAKER_JOB, Submission, TaskExit, record_submission
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueueSnapshot, SlurmJobRecord
from areal_hpc.slurm.states import parse_state
from areal_hpc.view.diagnosis import MIN_TIME_WITHOUT_PROGRESS_S, diagnose
from areal_hpc.view.state.jobs import (
    JobView,
    build_run_jobs,
    format_jobs,
    get_run_state,
)
from areal_hpc.view.state.run_view import LogTraceback, RunView, StepPace, TaskExitRecord
from tests.unit.view.test_diagnosis import NOW, evidence, job, log_file

TRAINER, CELL = job("trainer", "RUNNING", "1"), job("cell-0", "RUNNING", "2")


def ended(name: str, state: str, **facts: Any) -> JobView:
    return job(name, state, "9", ended_or_latest_end_at=NOW, nodes="n04", **facts)


def done(name: str) -> JobView:
    return dataclasses.replace(ended(name, "COMPLETED"), task_exits={0: TaskExit(0)})


def pending(name: str, reason: str) -> JobView:
    return job(name, "PENDING", "9", reason=reason)


def exit_of(name: str, code: int, reason: str) -> TaskExitRecord:
    return TaskExitRecord(name, 0, NOW, TaskExit(code, name, reason, "/x.log"))


def event(name: str, role: str, at: float = NOW, **facts: Any) -> dict[str, Any]:
    return {"time": at, "role": role, "event": name, **facts}


KILLED = event("process_exited", "trainer", NOW - 1, process="trainer", exit_code=137)
GLOO = LogTraceback(NOW, log_file("trainer", "trainer-1"), ("Traceback", "RuntimeError: gloo"))
SLOW, QUICK = StepPace(20.0, -MIN_TIME_WITHOUT_PROGRESS_S - 1), StepPace(20.0, -90)
"""The time of the last step is from now: the table is made long before its tests run."""
LOST_CELL = "cell-1 (job 9) "

SITUATIONS: dict[str, tuple[RunView, str, str, int]] = {
    "at work": (evidence(TRAINER, CELL), "running", "and nothing has failed", 0),
    "at work after a lost node": (
        evidence(TRAINER, CELL, starts_in_accounting=(ended("trainer", "NODE_FAIL").slurm_record,)),
        "running", "after this: 9 (job 9) on n04 lost a node", 0),
    "a cell was preempted and waits": (
        evidence(TRAINER, CELL, pending("cell-1", "BeginTime")), "running", "running", 0),
    "a cell waits for resources": (
        evidence(TRAINER, CELL, pending("cell-1", "Resources")), "running", "running", 0),
    "all wait for resources": (
        evidence(pending("trainer", "Resources")), "waiting", "waiting for free nodes", 0),
    "all wait by priority": (
        evidence(pending("trainer", "Priority")), "waiting", "jobs of higher priority", 0),
    "the trainer waits for SFT": (
        evidence(job("sft", "RUNNING", "1"), pending("trainer", "Dependency")),
        "running", "and nothing has failed", 0),
    "SFT failed under the trainer": (
        evidence(ended("sft", "FAILED"), pending("trainer", "DependencyNeverSatisfied")),
        "leaderless", "sft (job 9) ended with an error", 1),
    "the submission was killed": (
        evidence(pending("trainer", "JobHeldUser")), "waiting", "its user holds it", 1),
    "an administrator holds a cell": (
        evidence(TRAINER, pending("cell-1", "JobHeldAdmin")),
        "running", "but cell-1 (job 9) is pending: an administrator holds it", 1),
    "a launch failed and is held": (
        evidence(TRAINER, pending("cell-1", "launch_failed_requeued_held")),
        "running", "its last start failed on a node", 1),
    "a quota": (
        evidence(pending("trainer", "AssocGrpCpuLimit")), "waiting", "your group uses all", 0),
    "no such account": (
        evidence(pending("trainer", "InvalidAccount")), "waiting", "account is not valid", 1),
    "the trainer was scancelled": (
        evidence(ended("trainer", "CANCELLED"), CELL), "leaderless",
        "leaderless: trainer (job 9) was cancelled", 1),
    "the trainer was preempted for good": (
        evidence(ended("trainer", "PREEMPTED"), CELL), "leaderless",
        "was ended for a job of higher priority", 1),
    "the trainer met its limit in an outage": (
        evidence(ended("trainer", "TIMEOUT"), CELL), "leaderless", "at its time limit", 1),
    "the trainer is forgotten": (
        evidence(dataclasses.replace(TRAINER, slurm_record=None), CELL), "leaderless",
        "trainer (job 1) is no longer known to Slurm", 1),
    "a cell's node has no storage": (
        evidence(TRAINER, CELL, ended("cell-1", "FAILED")), "running, short of cells",
        f"short of cells: {LOST_CELL}ended with an error", 1),
    "a cell was scancelled": (
        evidence(TRAINER, CELL, ended("cell-1", "CANCELLED")), "running, short of cells",
        f"{LOST_CELL}was cancelled", 1),
    "a cell's work is done": (
        evidence(TRAINER, CELL, done("cell-1")), "running", "nothing has failed", 0),
    "a cell's container ended before its tasks": (
        evidence(TRAINER, CELL, ended("cell-1", "COMPLETED")), "running, short of cells",
        f"{LOST_CELL}ended by itself with exit code 0", 1),
    "the trainer is suspended": (
        evidence(job("trainer", "SUSPENDED", "1"), CELL), "running",
        "stalled: trainer (job 1) is suspended", 1),
    "no step for long": (
        evidence(TRAINER, CELL, pace=SLOW), "running", "stalled: no step for 5 min", 1),
    "steps come": (evidence(TRAINER, CELL, pace=QUICK), "running", "nothing has failed", 0),
    "the disk is full": (
        evidence(TRAINER, CELL, free_bytes=1 << 20), "running", "only 1 MiB are free", 1),
    "a rank was killed": (
        evidence(ended("trainer", "FAILED"), events=(KILLED,), tracebacks=(GLOO,)), "failed",
        "trainer of trainer ended: killed by SIGKILL", 1),
    "a user's bug": (
        evidence(ended("trainer", "FAILED"), tracebacks=(GLOO,)), "failed",
        "trainer/trainer-1@n01 raised RuntimeError: gloo", 1),
    "a wrong Python": (
        evidence(ended("trainer", "FAILED"), task_exits=(
            exit_of("trainer", 78, "no Python interpreter for role train: /no/python"),)),
        "failed", "exit code 78 (the recipe must change)", 1),
    "out of memory": (
        evidence(ended("trainer", "OUT_OF_MEMORY")), "failed", "used more memory", 1),
    "ended at too short a limit": (
        evidence(ended("trainer", "FAILED"), task_exits=(
            exit_of("trainer", 78, "the limit is too short"),)),
        "failed", "(the recipe must change)", 1),
    "a bad node was left out": (
        evidence(TRAINER, CELL, excluded_nodes=[
            {"node": "n07", "reason": "no storage", "at": NOW}]),
        "running", "node n07 failed its check: no storage", 0),
    "all is over, nothing was said": (
        evidence(done("trainer")), "stopped", "it left no error message", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_status_and_why_say_what_is(name: str) -> None:
    found, word, cause, code = SITUATIONS[name]
    if found.pace is not None:
        pace = dataclasses.replace(found.pace, last_at=time.time() + found.pace.last_at)
        found = copy.copy(found)
        found.pace = pace
    diagnosis = diagnose(found)
    assert found.state == word
    assert cause in diagnosis.headline
    assert diagnosis.is_well == (code == 0)
    assert diagnosis.is_well or diagnosis.hint


@pytest.mark.parametrize(
    ("markers", "word", "cause"),
    [
        (("FINISHED",), "finished", "every step was trained"),
        (("CANCELLED",), "being cancelled", "was being cancelled with areal-hpc cancel"),
        (("FINISHED", "CANCELLED"), "finished", "every step was trained"),
    ],
)
def test_what_people_and_the_run_itself_end(
    tmp_path: Path, markers: tuple[str, ...], word: str, cause: str
) -> None:
    for name in markers:
        (tmp_path / name).touch()
    found = evidence(TRAINER, CELL)
    found.jobs = dataclasses.replace(found.jobs, paths=RunPaths(tmp_path))
    diagnosis = diagnose(found)
    assert (found.state, diagnosis.is_well) == (word, True)
    assert cause in diagnosis.headline


def test_cells_that_an_earlier_launch_had_are_none_of_the_present_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    submitted = [
        *(("sft", 1), ("trainer", 1), ("cell-0", 1), ("cell-1", 1), ("cell-2", 1)),
        *(("trainer", 2), ("cell-10", 2), ("cell-8", 2)),
    ]
    for number, (name, attempt) in enumerate(submitted):
        record_submission(paths.submissions, Submission(name, str(number), attempt, NOW, ""))
    states = {number: parse_state("CANCELLED" if number < 5 else "RUNNING") for number in range(8)}
    states[2] = parse_state("RUNNING")
    queued = {str(number): SlurmJobRecord(str(number), state) for number, state in states.items()}
    run = build_run_jobs(paths, QueueSnapshot(queued))
    shown = [one.name for one in run.jobs]
    assert shown == ["sft", "trainer", "cell-0", "cell-8", "cell-10"]
    assert [one.name for one in run.jobs_ended_before_run] == ["sft"]


@pytest.mark.parametrize(
    ("caretaker", "reason", "shown", "word"),
    [
        ("PENDING", "Dependency", True, "running"),
        ("CANCELLED", "DependencyNeverSatisfied", False, "running"),
        ("PENDING", "Resources", True, "waiting"),
        ("RUNNING", "None", True, "waiting"),
    ],
)
def test_a_run_whose_jobs_are_gone_waits_while_its_caretaker_is_there(
    tmp_path: Path, caretaker: str, reason: str, shown: bool, word: str
) -> None:
    paths = RunPaths(tmp_path)
    for number, name in enumerate(("trainer", "cell-0", CARETAKER_JOB), 1):
        record_submission(paths.submissions, Submission(name, str(number), 1, NOW, ""))
    others = parse_state("RUNNING" if word == "running" else "PREEMPTED")
    queued = {number: SlurmJobRecord(number, others) for number in ("1", "2")}
    queued["3"] = SlurmJobRecord("3", parse_state(caretaker), reason)
    run = build_run_jobs(paths, QueueSnapshot(queued))
    assert [one.name for one in run.jobs] == [
        "trainer", "cell-0", *([CARETAKER_JOB] if shown else [])
    ]  # fmt: skip
    assert (get_run_state(run), run.jobs_ended_before_run) == (word, [])
    assert ("caretaker is pending" in "\n".join(format_jobs(run))) == (reason == "Resources")
