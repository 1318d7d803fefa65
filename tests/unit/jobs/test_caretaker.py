"""Which jobs a caretaker submits again, and which caretaker does it."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from areal_hpc.jobs.caretaker import (
    MAX_SUBMISSIONS_WITHOUT_PROGRESS,
    Caretaker,
    CaretakerConfig,
    JobStatus,
    select_jobs_to_watch,
)
from areal_hpc.rundir.jobs import (
    STOPPED_EXIT_CODE,
    JobSpec,
    LaunchFile,
    Submission,
    TaskExit,
    get_latest_submissions,
    read_submissions,
    record_submission,
)
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.lock import hold_lock_or_raise
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import SlurmJobRecord, parse_sacct
from areal_hpc.slurm.states import parse_state
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.slurm_launch import build_slurm_launch_info

NAMES = ("cell-0", "cell-1")
RUNNING_TRAINER = "1|RUNNING|None|n01|N/A|N/A|0|0|||"


def job(name: str, state: str = "", *exits: TaskExit, **changes: object) -> JobStatus:
    """A job that was submitted; without a state Slurm has forgotten it."""
    submission = Submission(name, "7", 1, 0.0, "job.sbatch")
    queued = SlurmJobRecord(
        "7",
        parse_state(state),
        nodes="n[04-05]",
        started_or_expected_at=50.0,
        ended_or_latest_end_at=51.0,
    )
    is_alive = state in ("RUNNING", "PENDING")
    found = JobStatus(name, submission, queued if state else None, exits, is_alive)
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state", ["FAILED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "CANCELLED", "COMPLETED", ""]
)
def test_what_ended_without_a_decision_is_submitted_again(state: str) -> None:
    assert job("cell-0", state).reason_to_submit
    stopped = TaskExit(STOPPED_EXIT_CODE, reason="preempted (not requeued)")
    assert job("cell-0", state, stopped).reason_to_submit


def test_what_is_there_is_done_or_is_not_wanted_is_left_alone() -> None:
    assert not job("cell-0", "RUNNING").reason_to_submit
    assert not job("cell-0", "PENDING").reason_to_submit
    assert not job("cell-0", "COMPLETED", TaskExit(0)).reason_to_submit
    assert not job("cell-0", "BREWING").reason_to_submit, "Slurm has it, in whatever state"
    assert not job("cell-0", "FAILED", TaskExit(0), TaskExit(1)).reason_to_submit
    assert not job("cell-0", "FAILED", TaskExit(1, gave_up=True)).reason_to_submit
    assert not job("cell-0", "CANCELLED", cancelled_by_person=True).reason_to_submit
    assert job("cell-0", submission=None).reason_to_submit == "was never submitted"


def test_a_node_is_to_blame_where_no_task_said_a_word() -> None:
    assert job("cell-0", "FAILED").faulty_node == job("cell-0", "COMPLETED").faulty_node == "n04"
    assert job("cell-0", "FAILED", TaskExit(1)).faulty_node == ""
    assert job("cell-0", "PREEMPTED").faulty_node == ""
    lived = SlurmJobRecord(
        "7",
        parse_state("FAILED"),
        nodes="n04",
        started_or_expected_at=50.0,
        ended_or_latest_end_at=950.0,
    )
    assert job("cell-0", "FAILED", slurm_record=lived).faulty_node == ""


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


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """Job 1, the trainer, runs; of others it knows nothing."""
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.list_running("1")
    slurm.answer("sacct", "exit 1")
    return slurm


@pytest.fixture
def caretaker(paths: RunPaths) -> Caretaker:
    """That of the trainer, in a run whose cells are gone."""
    for number, name in enumerate(("trainer", *NAMES), 1):
        files = paths.job(name)
        files.root.mkdir(parents=True)
        files.script.write_text("#!/bin/bash\n")
        record_submission(
            paths.submissions, Submission(name, str(number), 1, 0.0, str(files.script))
        )
        told = build_slurm_launch_info(paths, name, job_name=f"run-{name}")
        launch = LaunchFile(
            *(JobSpec(name, "agents", []), str(files.root), "", str(paths.events), {}), slurm=told
        )
        files.launch.write_bytes(msgspec.json.encode(launch))
    config = CaretakerConfig(run_dir=paths.root, job="trainer", leader="trainer", others=NAMES)
    return Caretaker(config)


def list_events(paths: RunPaths) -> list[tuple[str, str, bool]]:
    rows = read_readable_records(paths.events)
    return [(row["event"], row["job"], row.get("is_held", False)) for row in rows]


def test_a_job_that_slurm_refuses_keeps_no_other_one_away(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    slurm.answer("sbatch", 'case "$*" in *cell-0*) echo No partition >&2; exit 1;; esac; echo 12')
    for _ in range(2):
        caretaker.resubmit_missing_and_release_leader()
    newest = get_latest_submissions(read_submissions(paths.submissions))
    assert {name: one.job_id for name, one in newest.items()} == {
        "trainer": "1",
        "cell-0": "2",
        "cell-1": "12",
    }
    slurm.list_running("1", "12")
    caretaker.resubmit_missing_and_release_leader()
    assert list_events(paths) == [
        ("submission_refused", "cell-0", False),
        ("job_submitted_again", "cell-1", False),
    ]
    assert sum("cell-0" in call for call in slurm.list_calls("sbatch")) == 2, "it is tried again"


def test_submissions_that_slurm_did_not_take_are_no_tries_of_the_job(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    slurm.answer("sbatch", "echo AssocMaxSubmitJobLimit >&2; exit 1")
    for _ in range(MAX_SUBMISSIONS_WITHOUT_PROGRESS + 2):
        caretaker.resubmit_missing_and_release_leader()
    slurm.answer("sbatch", "echo 12")
    for _ in range(MAX_SUBMISSIONS_WITHOUT_PROGRESS + 1):
        caretaker.resubmit_missing_and_release_leader()
    submitted = [event for event in list_events(paths) if event[0] == "job_submitted_again"]
    assert submitted == [
        ("job_submitted_again", name, number == MAX_SUBMISSIONS_WITHOUT_PROGRESS)
        for number in range(MAX_SUBMISSIONS_WITHOUT_PROGRESS + 1)
        for name in NAMES
    ]


def test_what_a_person_cancelled_stays_away_when_slurm_has_forgotten_it(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    """Without accounting nobody knows of job 2 once squeue has forgotten it."""
    slurm.answer("sbatch", "echo 12")
    ended = "2|CANCELLED|None|n01|N/A|N/A|0|15|||"
    slurm.answer(
        "squeue", f'case "$*" in *--jobs*) echo "{RUNNING_TRAINER}"; echo "{ended}";; esac'
    )
    caretaker.resubmit_missing_and_release_leader()
    slurm.list_running("1", "12")
    for looks in (caretaker, Caretaker(caretaker._config)):
        for _ in range(3):
            looks.resubmit_missing_and_release_leader()
    assert list_events(paths) == [("job_submitted_again", "cell-1", False)]
    record_submission(paths.submissions, Submission("cell-0", "20", 1, 0.0, "job.sbatch"))
    for _ in range(2):
        caretaker.resubmit_missing_and_release_leader()
    assert list_events(paths)[1:] == [("job_submitted_again", "cell-0", False)], "it came back once"


def test_what_a_launcher_is_submitting_is_left_to_it(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    slurm.answer("sbatch", "echo 12")
    with hold_lock_or_raise(paths.lock):
        for _ in range(3):
            caretaker.resubmit_missing_and_release_leader()
    assert slurm.list_calls("sbatch") == []
    for _ in range(2):
        caretaker.resubmit_missing_and_release_leader()
    assert len(slurm.list_calls("sbatch")) == len(NAMES)


def test_what_somebody_submitted_during_the_look_is_not_submitted_again(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    """Each look at the queue is followed by a submission of cell-0 by somebody else."""
    fields = {"job": "cell-0", "job_id": "$RANDOM", "attempt": 1, "submitted_at": 0, "script": ""}
    record = json.dumps(fields).replace('"', r"\"")
    slurm.answer("sbatch", "echo 12")
    slurm.answer(
        "squeue",
        f'case "$*" in *--jobs*) echo "{RUNNING_TRAINER}";;'
        f' *) echo "{record}" >> {paths.submissions};; esac',
    )
    for _ in range(3):
        caretaker.resubmit_missing_and_release_leader()
    assert {event[1] for event in list_events(paths)} == {"cell-1"}


def test_a_job_of_which_an_older_submission_runs_is_not_missing(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    """The newest of cell-0 had started first, and gave way to it."""
    record_submission(paths.submissions, Submission("cell-0", "20", 1, 0.0, "job.sbatch"))
    running_cell = RUNNING_TRAINER.replace("1|", "2|", 1)
    slurm.answer("sbatch", "echo 12")
    slurm.answer("squeue", f'echo "{RUNNING_TRAINER}"; echo "{running_cell}"')
    for _ in range(2):
        caretaker.resubmit_missing_and_release_leader()
    assert list_events(paths) == [("job_submitted_again", "cell-1", False)]
