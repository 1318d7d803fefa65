"""Caretakers submit lost jobs again, and one caretaker looks after each job."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from areal_hpc.jobs.caretaker import Caretaker, CaretakerConfig
from areal_hpc.jobs.job_status import (
    MAX_SUBMISSIONS_WITHOUT_PROGRESS,
    JobStatus,
    StageJobs,
    select_jobs_to_watch,
)
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    STOPPED_EXIT_CODE,
    JobSpec,
    LaunchFile,
    SlurmLaunchInfo,
    Submission,
    TaskExit,
    get_latest_submissions,
    read_submissions,
    record_submission,
)
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.lock import hold_lock
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import SlurmJobRecord
from areal_hpc.slurm.states import parse_state
from tests.support.scripted_slurm import ScriptedSlurm

NAMES = ("cell-0", "cell-1")
STAGE = StageJobs(leader="trainer", others=NAMES, done_marker=Path("FINISHED"))
RUNNING_TRAINER = "1|RUNNING|None|n01|N/A|N/A|0|0|||"


def job(name: str, state: str = "", *exits: TaskExit, **changes: object) -> JobStatus:
    """Make a job that was submitted; without a state Slurm has forgotten it."""
    submission = Submission(name, "7", 1, 0.0, "job.sbatch")
    queued = SlurmJobRecord(
        "7",
        parse_state(state),
        nodes="n[04-05]",
        started_or_expected_at=50.0,
        ended_or_latest_end_at=51.0,
    )
    is_alive = state in ("RUNNING", "PENDING")
    status = JobStatus(name, submission, queued if state else None, exits, is_alive)
    return replace(status, **changes)  # type: ignore[arg-type]


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
    trainer: str, cells: tuple[str, str], charges: dict[str, tuple[str, ...]]
) -> None:
    states = zip(("trainer", *NAMES), (trainer, *cells), strict=True)
    jobs = {name: job(name, state) for name, state in states}
    chosen = {}
    for name in jobs:
        if name == "trainer" or jobs[name].is_running:
            chosen[name] = tuple(select_jobs_to_watch(name, [STAGE], jobs))
    assert {name: names for name, names in chosen.items() if names} == {"trainer": NAMES, **charges}


GAVE_UP, IDLE = TaskExit(78, gave_up=True), TaskExit(79)


@pytest.mark.parametrize(
    ("sft", "trainer", "cell", "charges"),
    [
        (job("sft", "PREEMPTED"), job("trainer", "CANCELLED"), job("cell-0", "CANCELLED"), 3),
        (job("sft", "FAILED", GAVE_UP), job("trainer", "CANCELLED"), job("cell-0", "CANCELLED"), 0),
        (None, job("trainer", "PREEMPTED"), job("cell-0", "PREEMPTED"), 2),
        (None, job("trainer", "CANCELLED", cancelled_by_person=True), job("cell-0", "FAILED"), 0),
        (None, job("trainer", "FAILED", is_given_up=True), job("cell-0", "PREEMPTED"), 0),
        (None, job("trainer", "PENDING"), job("cell-0", "FAILED", IDLE), 1),
        (None, job("trainer", "RUNNING"), job("cell-0", "FAILED", IDLE), 2),
        (None, job("trainer", "FAILED", IDLE), job("cell-0", "PENDING"), 1),
        (None, job("trainer", "FAILED", IDLE), job("cell-0", "FAILED", IDLE), 2),
    ],
    ids=[
        *("sft is lost", "sft gave up", "all lost", "a person cancelled the trainer"),
        *("the trainer is given up", "a cell is idle as the trainer waits", "as it runs"),
        *("the trainer is idle as the cell waits", "both are idle"),
    ],
)
def test_from_outside_what_is_to_come_back_is_looked_after(
    sft: JobStatus | None, trainer: JobStatus, cell: JobStatus, charges: int
) -> None:
    jobs = {status.name: status for status in (sft, trainer, cell) if status is not None}
    earlier = [StageJobs(leader="sft", others=(), done_marker=Path("sft"))] if sft else []
    train = StageJobs(leader="trainer", others=("cell-0",), done_marker=Path("FINISHED"))
    assert len(select_jobs_to_watch(CARETAKER_JOB, [*earlier, train], jobs)) == charges


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    """Slurm that knows job 1 alone, the trainer, which runs."""
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.list_running("1")
    slurm.answer("sacct", "exit 1")
    return slurm


@pytest.fixture
def caretaker(paths: RunPaths) -> Caretaker:
    """Caretaker in the trainer's job of a run whose cells are gone."""
    for number, name in enumerate(("trainer", *NAMES), 1):
        files = paths.job(name)
        files.root.mkdir(parents=True)
        files.script.write_text("#!/bin/bash\n")
        record_submission(
            paths.submissions, Submission(name, str(number), 1, 0.0, str(files.script))
        )
        info = SlurmLaunchInfo()
        launch = LaunchFile(
            *(JobSpec(name, "agents", []), str(files.root), "", str(paths.events), {}), slurm=info
        )
        files.launch.write_bytes(msgspec.json.encode(launch))
    stage = STAGE.model_copy(update={"done_marker": paths.finished_marker})
    return Caretaker(CaretakerConfig(run_dir=paths.root, job="trainer", stages=(stage,)))


def list_events(paths: RunPaths) -> list[tuple[str, str]]:
    return [(row["event"], row["job"]) for row in read_readable_records(paths.events)]


def test_a_job_that_slurm_refuses_keeps_no_other_one_away(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    slurm.answer("sbatch", 'case "$*" in *cell-0*) echo No partition >&2; exit 1;; esac; echo 12')
    for _ in range(2):
        caretaker.look()
    newest = get_latest_submissions(read_submissions(paths.submissions))
    assert {name: submission.job_id for name, submission in newest.items()} == {
        "trainer": "1",
        "cell-0": "2",
        "cell-1": "12",
    }
    slurm.list_running("1", "12")
    caretaker.look()
    assert list_events(paths) == [
        ("submission_refused", "cell-0"),
        ("job_submitted_again", "cell-1"),
    ]
    assert sum("cell-0" in call for call in slurm.list_calls("sbatch")) == 2, "it is tried again"


def test_submissions_that_slurm_did_not_take_are_no_tries_of_the_job(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    slurm.answer("sbatch", "echo AssocMaxSubmitJobLimit >&2; exit 1")
    for _ in range(MAX_SUBMISSIONS_WITHOUT_PROGRESS + 2):
        caretaker.look()
    slurm.answer("sbatch", "echo 12")
    for _ in range(MAX_SUBMISSIONS_WITHOUT_PROGRESS + 3):
        caretaker.look()
    events = [event for event in list_events(paths) if event[0] != "submission_refused"]
    again = [("job_submitted_again", name) for name in NAMES]
    assert events == [
        *again * MAX_SUBMISSIONS_WITHOUT_PROGRESS,
        *[("job_given_up", name) for name in NAMES],
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
    caretaker.look()
    slurm.list_running("1", "12")
    for looks in (caretaker, Caretaker(caretaker._config)):
        for _ in range(3):
            looks.look()
    assert list_events(paths) == [("job_submitted_again", "cell-1")]
    record_submission(paths.submissions, Submission("cell-0", "20", 1, 0.0, "job.sbatch"))
    for _ in range(2):
        caretaker.look()
    assert list_events(paths)[1:] == [("job_submitted_again", "cell-0")], "it came back once"


def test_what_a_launcher_is_submitting_is_left_to_it(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    slurm.answer("sbatch", "echo 12")
    with hold_lock(paths.lock):
        for _ in range(3):
            caretaker.look()
    assert slurm.list_calls("sbatch") == []
    for _ in range(2):
        caretaker.look()
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
        caretaker.look()
    assert {event[1] for event in list_events(paths)} == {"cell-1"}


def test_a_job_of_which_an_older_submission_runs_is_not_missing(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    """The newest submission of cell-0 had started first, and gave way to the older one."""
    record_submission(paths.submissions, Submission("cell-0", "20", 1, 0.0, "job.sbatch"))
    running_cell = RUNNING_TRAINER.replace("1|", "2|", 1)
    slurm.answer("sbatch", "echo 12")
    slurm.answer("squeue", f'echo "{RUNNING_TRAINER}"; echo "{running_cell}"')
    for _ in range(2):
        caretaker.look()
    assert list_events(paths) == [("job_submitted_again", "cell-1")]


def test_from_outside_jobs_follow_the_stage_that_they_wait_for(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    """The SFT job was never submitted, and is refused for a while."""
    sft = StageJobs(leader="sft", others=(), done_marker=paths.sft_export)
    shutil.copytree(paths.job("cell-0").root, paths.job("sft").root)
    stages = (sft, *caretaker._config.stages)
    outside = Caretaker(CaretakerConfig(run_dir=paths.root, job=CARETAKER_JOB, stages=stages))
    slurm.answer("squeue", "true")
    slurm.answer("sbatch", "echo AssocMaxSubmitJobLimit >&2; exit 1")
    for _ in range(2):
        assert outside.look() == "unsettled"
    assert all("-sft." in call for call in slurm.list_calls("sbatch"))
    slurm.answer("sbatch", "echo 12")
    assert outside.look() == "at work"
    waits = ["--dependency=afterok:12 " in call for call in slurm.list_calls("sbatch")[-4:]]
    assert waits == [False, True, True, True]


def test_the_job_behind_the_others_is_submitted_again_and_follows_their_numbers(
    slurm: ScriptedSlurm, caretaker: Caretaker, paths: RunPaths
) -> None:
    shutil.copytree(paths.job("cell-0").root, paths.job(CARETAKER_JOB).root)
    slurm.answer("sbatch", "echo $((20 + $(grep -c ^sbatch $CALLS)))")
    slurm.answer("scontrol", "true")
    for _ in range(2):
        caretaker.look()
    newest = get_latest_submissions(read_submissions(paths.submissions))
    assert [newest[name].job_id for name in (*NAMES, CARETAKER_JOB)] == ["21", "22", "23"]
    assert "--dependency=afternotok:1,afterany:21:22" in slurm.list_calls("sbatch")[-1]
    row = "{}|{}|{}||N/A|N/A|0|0|||"
    waiting = [row.format("1", "RUNNING", ""), row.format("21", "RUNNING", "")]
    waiting += [row.format("22", "FAILED", ""), row.format("23", "PENDING", "Dependency")]
    slurm.answer("squeue", "; ".join(f"echo '{line}'" for line in waiting))
    caretaker.look()
    updated = "scontrol update JobId=23 Dependency=afternotok:1,afterany:21:24"
    assert slurm.list_calls("scontrol") == [updated]
