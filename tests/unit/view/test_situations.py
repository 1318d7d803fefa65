"""`status` and `why` report a run's situation: chain of causes, word, cause and exit code."""

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
from areal_hpc.view.diagnosis import MIN_TIME_WITHOUT_PROGRESS_S, diagnose, format_diagnosis
from areal_hpc.view.logs import LogFile
from areal_hpc.view.state.jobs import JobView, RunJobs, build_run_jobs, format_jobs, get_run_state
from areal_hpc.view.state.run_view import (
    LogTraceback,
    RunView,
    StepPace,
    TaskExitRecord,
    find_last_traceback,
)

NOW = 1_000_000.0
EXITED = {"role": "trainer", "event": "process_exited", "process": "trainer", "exit_code": 1}


def job(name: str, state: str, job_id: str, **facts: Any) -> JobView:
    submission = Submission(name, job_id, 1, NOW - 100, "/nowhere/job.sbatch")
    queued = SlurmJobRecord(job_id, parse_state(state), **facts)
    return JobView(name, submission, queued, {})


def evidence(*jobs: JobView, **more: Any) -> RunView:
    """Make a run with these jobs; facts that are not given were not recorded."""
    look = QueueSnapshot(
        {job.slurm_record.job_id: job.slurm_record for job in jobs if job.slurm_record}
    )
    ids = tuple(job.submission.job_id for job in jobs if job.submission)
    paths = RunPaths(Path("/nowhere"))
    view = RunView(paths, jobs=RunJobs(paths, jobs, look, ids))
    for name, value in {"starts_in_accounting": (), "task_exits": (), **more}.items():
        assert hasattr(RunView, name)
        setattr(view, name, value)
    return view


AT_WORK = job("trainer", "RUNNING", "1")


def log_file(job: str, process: str) -> LogFile:
    return LogFile(Path(f"/logs/{job}/{process}.log"), job, process, "n01")


def test_the_first_traceback_outweighs_what_it_brought_about() -> None:
    lines = ("Traceback (most recent call last):", '  File "a.py"', "ValueError: not a number")
    run = evidence(
        job("trainer", "FAILED", "1", ended_or_latest_end_at=NOW + 9, exit_code=1),
        job("cell-0", "CANCELLED", "2", ended_or_latest_end_at=NOW + 30),
        tracebacks=(LogTraceback(NOW, log_file("trainer", "trainer-3"), lines),),
        events=({**EXITED, "time": NOW + 1}, {**EXITED, "time": NOW + 5, "exit_code": 134}),
        task_exits=(
            TaskExitRecord("trainer", 3, NOW + 6, TaskExit(1, "trainer", "ValueError", "/x.log")),
        ),
    )
    diagnosis = diagnose(run)
    assert "trainer-3@n01 raised ValueError: not a number" in diagnosis.headline
    times = [finding.at for finding in diagnosis.chain]
    assert times == sorted(times, key=lambda at: at or 0)
    assert len(times) == 6
    assert not diagnosis.is_well
    assert any("killed by SIGABRT" in finding.text for finding in diagnosis.chain)


def test_memory_outweighs_the_traceback_of_another() -> None:
    starved = job(
        "cell-0",
        "FAILED",
        "2",
        ended_or_latest_end_at=NOW,
        exit_code=1,
        failed_step_states=("OUT_OF_MEMORY",),
    )
    lines = ("Traceback (most recent call last):", "ConnectionError: gone")
    run = evidence(
        starved, tracebacks=(LogTraceback(NOW + 1, log_file("cell-0", "driver"), lines),)
    )
    assert "cell-0 (job 2) used more memory" in diagnose(run).headline
    assert "more memory" in diagnose(run).hint


def test_a_run_that_waits_names_what_needs_somebody_first() -> None:
    waiting = job("trainer", "PENDING", "1", reason="Priority")
    diagnosis = diagnose(evidence(waiting, job("cell-0", "PENDING", "2", reason="InvalidQOS")))
    assert diagnosis.headline.startswith("cell-0 (job 2) is pending: its QOS is not valid")
    assert not diagnosis.is_well
    assert diagnose(evidence(waiting)).is_well, "waiting long in the queue is normal"


def test_a_cell_that_gave_its_nodes_back_needs_nobody() -> None:
    idle = dataclasses.replace(
        job("cell-0", "FAILED", "2", ended_or_latest_end_at=NOW),
        task_exits={0: TaskExit(79, "driver", "nothing to do", "/x.log")},
    )
    diagnosis = diagnose(run := evidence(AT_WORK, idle))
    assert run.jobs.jobs_ended_before_run == []
    assert diagnosis.is_well
    assert "cell-0 had nothing to do and released its nodes" in "\n".join(format_jobs(run.jobs))


def test_what_a_run_has_outlived_for_long_is_history() -> None:
    now = time.time()
    lost = parse_state("NODE_FAIL")
    past = SlurmJobRecord("1", lost, nodes="n07", ended_or_latest_end_at=now - 300)
    pace = StepPace(10.0, now)
    diagnosis = diagnose(evidence(AT_WORK, starts_in_accounting=(past,), pace=pace))
    assert "has trained steps since this, 5 min" in diagnosis.headline
    assert "lost a node: NODE_FAIL" in diagnosis.headline
    chain = tuple({**EXITED, "time": now - 2 - age, "exit_code": 137} for age in range(0, 250, 25))
    assert "after this" in diagnose(evidence(AT_WORK, events=chain, pace=pace)).headline


def test_an_error_that_was_made_for_people_comes_first() -> None:
    message = "inference.tool_call_parser: SGLang has no parser 'qwn'\n  did you mean qwen25?"
    word = TaskExit(78, "inference", message, "/x.log", gave_up=True, says_why=True)
    failed = job("cell-0", "FAILED", "2", ended_or_latest_end_at=NOW)
    diagnosis = diagnose(evidence(failed, task_exits=(TaskExitRecord("cell-0", 0, NOW, word),)))
    assert "cell-0: inference.tool_call_parser: SGLang has no parser 'qwn'" in diagnosis.headline
    assert any("did you mean qwen25?" in text for line in diagnosis.chain for text in line.details)


def test_equal_failures_are_one_line_with_a_count() -> None:
    kills = tuple({**EXITED, "time": NOW + delay, "exit_code": 137} for delay in range(10))
    lines = format_diagnosis(diagnose(evidence(AT_WORK, events=kills)), "RUN")
    (line,) = (line for line in lines if "(10 times)" in line)
    assert "killed by SIGKILL" in line


def test_what_slurm_wrote_at_an_earlier_start_is_not_what_happened_last() -> None:
    line = "slurmstepd-n01: error: *** STEP 1.0 ON n01 CANCELLED AT 1970-01-12T00:00:00 ***"
    requeued = {"time": NOW, "role": "trainer", "event": "job_requeued", "reason": "stopped"}
    trainer = job("trainer", "RUNNING", "1", ended_or_latest_end_at=NOW + 3600)
    diagnosis = diagnose(evidence(trainer, slurm_lines=(("trainer", line),), events=(requeued,)))
    assert diagnosis.headline.endswith(
        "after this: trainer requested another start from Slurm: stopped"
    )
    assert len(diagnosis.chain) == 1, "hours lie between them"


def test_a_silent_slurm_is_not_a_failed_run() -> None:
    run = evidence(AT_WORK)
    run.jobs = dataclasses.replace(
        run.jobs,
        snapshot=QueueSnapshot(outage="squeue had no answer"),
        jobs=(dataclasses.replace(AT_WORK, slurm_record=None),),
    )
    assert "Slurm does not answer" in diagnose(run).headline


def test_of_chained_tracebacks_the_cause_is_taken() -> None:
    text = """2026-11-22 10:00:00,000 ERROR it fell
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'the cause'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 2, in g
RuntimeError: the effect
2026-11-22 10:00:01,000 INFO goodbye
"""
    stack = find_last_traceback(log_file("trainer", "trainer"), text)
    assert stack is not None
    assert stack.lines[-1] == "KeyError: 'the cause'"
    assert stack.at is not None


def test_digits_in_a_log_that_are_no_time_do_not_hide_its_traceback() -> None:
    """Databases print such digits for a missing date."""
    lines = ("Traceback (most recent call last):", "ValueError: no date")
    text = "\n".join(["0000-00-00 00:00:00 | NULL", *lines])
    stack = find_last_traceback(log_file("trainer", "trainer"), text)
    assert stack is not None
    assert (stack.at, stack.lines) == (None, lines)


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
    run, word, cause, code = SITUATIONS[name]
    if run.pace is not None:
        pace = dataclasses.replace(run.pace, last_at=time.time() + run.pace.last_at)
        run = copy.copy(run)
        run.pace = pace
    diagnosis = diagnose(run)
    assert run.state == word
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
    run = evidence(TRAINER, CELL)
    run.jobs = dataclasses.replace(run.jobs, paths=RunPaths(tmp_path))
    diagnosis = diagnose(run)
    assert (run.state, diagnosis.is_well) == (word, True)
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
    shown = [job.name for job in run.jobs]
    assert shown == ["sft", "trainer", "cell-0", "cell-8", "cell-10"]
    assert [job.name for job in run.jobs_ended_before_run] == ["sft"]


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
    assert [job.name for job in run.jobs] == [
        "trainer", "cell-0", *([CARETAKER_JOB] if shown else [])
    ]  # fmt: skip
    assert (get_run_state(run), run.jobs_ended_before_run) == (word, [])
    assert ("caretaker is pending" in "\n".join(format_jobs(run))) == (reason == "Resources")
