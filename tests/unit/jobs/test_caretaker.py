"""Which jobs a caretaker submits again, and which caretaker does it."""

from dataclasses import replace
from pathlib import Path

import pytest

from areal_hpc.jobs.caretaker import CaretakerConfig, JobStatus, select_jobs_to_watch
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE, Submission, TaskExit
from areal_hpc.slurm.queue import QueuedJob, parse_sacct
from areal_hpc.slurm.states import parse_state

NAMES = ("cell-0", "cell-1")


def job(name: str, state: str = "", *exits: TaskExit, **changes: object) -> JobStatus:
    """A job that was submitted; without a state Slurm has forgotten it."""
    submission = Submission(name, "7", 1, 0.0, "job.sbatch")
    queued = QueuedJob("7", parse_state(state), nodes="n[04-05]", start=50.0, end=51.0)
    is_alive = state in ("RUNNING", "PENDING")
    found = JobStatus(name, submission, queued if state else None, exits, is_alive)
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "CANCELLED", ""])
def test_what_ended_without_a_decision_is_submitted_again(state: str) -> None:
    assert job("cell-0", state).reason_to_submit
    stopped = TaskExit(STOPPED_EXIT_CODE, reason="preempted (not requeued)")
    assert job("cell-0", state, stopped).reason_to_submit


def test_what_is_there_is_done_or_is_not_wanted_is_left_alone() -> None:
    assert not job("cell-0", "RUNNING").reason_to_submit
    assert not job("cell-0", "PENDING").reason_to_submit
    assert not job("cell-0", "COMPLETED").reason_to_submit
    assert not job("cell-0", "FAILED", TaskExit(0), TaskExit(1)).reason_to_submit
    assert not job("cell-0", "FAILED", TaskExit(1, gave_up=True)).reason_to_submit
    assert not job("cell-0", "CANCELLED", cancelled_by_person=True).reason_to_submit
    assert job("cell-0", submission=None).reason_to_submit == "was never submitted"


def test_a_node_is_to_blame_where_no_task_said_a_word() -> None:
    assert job("cell-0", "FAILED").faulty_node == "n04"
    assert job("cell-0", "FAILED", TaskExit(1)).faulty_node == ""
    assert job("cell-0", "PREEMPTED").faulty_node == ""
    lived = QueuedJob("7", parse_state("FAILED"), nodes="n04", start=50.0, end=950.0)
    assert job("cell-0", "FAILED", queued=lived).faulty_node == ""


@pytest.mark.parametrize(
    ("trainer", "cells", "charges"),
    [
        ("RUNNING", ("RUNNING", "RUNNING"), {"trainer": NAMES}),
        ("PENDING", ("RUNNING", "RUNNING"), {"trainer": NAMES}),
        ("FAILED", ("RUNNING", "RUNNING"), {"cell-0": ("trainer",)}),
        ("", ("FAILED", "RUNNING"), {"cell-1": ("trainer",)}),
        ("FAILED", ("PENDING", "RUNNING"), {"cell-1": ("trainer",)}),
    ],
)
def test_one_caretaker_looks_after_each_job(
    tmp_path: Path, trainer: str, cells: tuple[str, str], charges: dict[str, tuple[str, ...]]
) -> None:
    states = zip(("trainer", *NAMES), (trainer, *cells), strict=True)
    jobs = {name: job(name, state) for name, state in states}
    found = {}
    for name in jobs:
        config = CaretakerConfig(run_dir=tmp_path, job=name, leader="trainer", others=NAMES)
        if name == "trainer" or jobs[name].is_running:
            found[name] = select_jobs_to_watch(config, jobs)
    assert {name: names for name, names in found.items() if names} == {
        "trainer": NAMES,
        **charges,
    }


def test_accounting_says_who_cancelled() -> None:
    rows = "7|CANCELLED by 1001|0:15|n04|Unknown|Unknown|None\n8|FAILED|1:0|n04|U|U|None"
    assert [one.cancelled_by for one in parse_sacct(rows)] == [1001, None]
