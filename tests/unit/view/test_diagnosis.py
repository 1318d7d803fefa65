"""The chain of causes, from evidence as it lies in run directories."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from areal_hpc.rundir.jobs import Submission, TaskExit
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueueSnapshot, SlurmJobRecord
from areal_hpc.slurm.states import parse_state
from areal_hpc.view.diagnosis import (
    diagnose,
    format_diagnosis,
)
from areal_hpc.view.logs import LogFile
from areal_hpc.view.state.jobs import JobView, RunJobs, format_jobs
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
    """A run with these jobs; what is not given was not recorded."""
    look = QueueSnapshot(
        {one.slurm_record.job_id: one.slurm_record for one in jobs if one.slurm_record}
    )
    ids = tuple(one.submission.job_id for one in jobs if one.submission)
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
    found = evidence(
        job("trainer", "FAILED", "1", ended_or_latest_end_at=NOW + 9, exit_code=1),
        job("cell-0", "CANCELLED", "2", ended_or_latest_end_at=NOW + 30),
        tracebacks=(LogTraceback(NOW, log_file("trainer", "trainer-3"), lines),),
        events=({**EXITED, "time": NOW + 1}, {**EXITED, "time": NOW + 5, "exit_code": 134}),
        task_exits=(
            TaskExitRecord("trainer", 3, NOW + 6, TaskExit(1, "trainer", "ValueError", "/x.log")),
        ),
    )
    diagnosis = diagnose(found)
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
    found = evidence(
        starved, tracebacks=(LogTraceback(NOW + 1, log_file("cell-0", "driver"), lines),)
    )
    assert "cell-0 (job 2) used more memory" in diagnose(found).headline
    assert "more memory" in diagnose(found).hint


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
    diagnosis = diagnose(found := evidence(AT_WORK, idle))
    assert found.jobs.jobs_ended_before_run == []
    assert diagnosis.is_well
    assert "cell-0 had nothing to do and released its nodes" in "\n".join(format_jobs(found.jobs))


def test_what_a_run_has_outlived_for_long_is_history() -> None:
    now = time.time()
    lost = parse_state("NODE_FAIL")
    past = SlurmJobRecord("1", lost, nodes="n07", ended_or_latest_end_at=now - 300)
    pace = StepPace(10.0, now)
    found = diagnose(evidence(AT_WORK, starts_in_accounting=(past,), pace=pace))
    assert "has trained steps since this, 5 min" in found.headline
    assert "lost a node: NODE_FAIL" in found.headline
    chain = tuple({**EXITED, "time": now - 2 - at, "exit_code": 137} for at in range(0, 250, 25))
    assert "after this" in diagnose(evidence(AT_WORK, events=chain, pace=pace)).headline


def test_an_error_that_was_made_for_people_comes_first() -> None:
    said = "inference.tool_call_parser: SGLang has no parser 'qwn'\n  did you mean qwen25?"
    word = TaskExit(78, "inference", said, "/x.log", gave_up=True, says_why=True)
    failed = job("cell-0", "FAILED", "2", ended_or_latest_end_at=NOW)
    found = diagnose(evidence(failed, task_exits=(TaskExitRecord("cell-0", 0, NOW, word),)))
    assert "cell-0: inference.tool_call_parser: SGLang has no parser 'qwn'" in found.headline
    assert any("did you mean qwen25?" in one for line in found.chain for one in line.details)


def test_equal_failures_are_one_line_with_a_count() -> None:
    kills = tuple({**EXITED, "time": NOW + at, "exit_code": 137} for at in range(10))
    lines = format_diagnosis(diagnose(evidence(AT_WORK, events=kills)), "RUN")
    (line,) = (line for line in lines if "(10 times)" in line)
    assert "killed by SIGKILL" in line


def test_what_slurm_wrote_at_an_earlier_start_is_not_what_happened_last() -> None:
    line = "slurmstepd-n01: error: *** STEP 1.0 ON n01 CANCELLED AT 1970-01-12T00:00:00 ***"
    requeued = {"time": NOW, "role": "trainer", "event": "job_requeued", "reason": "stopped"}
    trainer = job("trainer", "RUNNING", "1", ended_or_latest_end_at=NOW + 3600)
    found = diagnose(evidence(trainer, slurm_lines=(("trainer", line),), events=(requeued,)))
    assert found.headline.endswith(
        "after this: trainer requested another start from Slurm: stopped"
    )
    assert len(found.chain) == 1, "hours lie between them"


def test_a_silent_slurm_is_not_a_failed_run() -> None:
    found = evidence(AT_WORK)
    found.jobs = dataclasses.replace(
        found.jobs,
        snapshot=QueueSnapshot(outage="squeue had no answer"),
        jobs=(dataclasses.replace(AT_WORK, slurm_record=None),),
    )
    assert "Slurm does not answer" in diagnose(found).headline


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
    """Such as the date of nothing that databases print."""
    lines = ("Traceback (most recent call last):", "ValueError: no date")
    text = "\n".join(["0000-00-00 00:00:00 | NULL", *lines])
    stack = find_last_traceback(log_file("trainer", "trainer"), text)
    assert stack is not None
    assert (stack.at, stack.lines) == (None, lines)
