"""What squeue and sacct of Slurm 22.05 printed on a devcluster, and what is made of it."""

import time
from functools import partial
from pathlib import Path

import pytest

from areal_hpc.rundir.jobs import Submission, record_submission
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm import queue
from areal_hpc.slurm.queue import (
    SQUEUE_COLUMNS,
    QueuePoller,
    QueueSnapshot,
    SlurmJobRecord,
    parse_sacct,
    parse_squeue,
)
from areal_hpc.slurm.run_jobs import is_job_of_run
from areal_hpc.slurm.states import JobPhase
from tests.support.commands import exit_code_of
from tests.support.scripted_slurm import ScriptedSlurm

SQUEUE_ROWS = """\
8|CANCELLED|DependencyNeverSatisfied||N/A|2026-11-22T03:05:39|0|0
2|FAILED|NonZeroExitCode|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|0|768
3|FAILED|NonZeroExitCode|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|0|19968
7|PENDING|Resources||2026-11-22T04:05:38|2026-11-22T05:05:38|0|0
9|PENDING|Dependency||N/A|N/A|2|0
12|PENDING|Priority||2026-11-22T05:05:00|2026-11-22T06:05:00|0|0
1|RUNNING|None|n[01-02]|2026-11-22T03:05:38|2026-11-22T04:05:38|1|0
""".splitlines()


def printed(row: str) -> str:
    """A row as wide as squeue prints it."""
    cells = (*row.split("|"), "exp-one-trainer", "/runs/exp/one")
    wide = (cell.ljust(width) for cell, (_, width) in zip(cells, SQUEUE_COLUMNS, strict=True))
    return "|".join(wide) + "|\n"


SACCT = """\
1|RUNNING|0:0|n01|2026-11-22T03:05:38|Unknown|None
1.batch|RUNNING|0:0|n01|2026-11-22T03:05:38|Unknown|
1.0|RUNNING|0:0|n01|2026-11-22T03:05:38|Unknown|
4|FAILED|9:0|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|None
4.batch|FAILED|9:0|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|
4.0|CANCELLED|0:9|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|
5|FAILED|1:0|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|None
5.batch|FAILED|1:0|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|
5.0|OUT_OF_MEMORY|0:125|n01|2026-11-22T03:05:38|2026-11-22T03:05:38|
6|PENDING|0:0|None assigned|Unknown|Unknown|JobHeldUser
13|CANCELLED by 0|0:0|None assigned|2026-11-22T03:05:41|2026-11-22T03:05:41|None
17|PREEMPTED|0:0|n02|2026-11-22T03:10:00|2026-11-22T03:11:00|None
17|COMPLETED|0:0|n03|2026-11-22T03:11:06|2026-11-22T03:12:00|None
"""


def at(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def squeue() -> dict[str, SlurmJobRecord]:
    return {job.job_id: job for job in parse_squeue("".join(map(printed, SQUEUE_ROWS)))}


def test_squeue_tells_states_times_nodes_and_restarts() -> None:
    jobs = squeue()
    assert len(jobs) == len(SQUEUE_ROWS)
    running = jobs["1"]
    assert running.state.phase is JobPhase.RUNNING
    assert (running.nodes, running.restarts, running.reason) == ("n[01-02]", 1, "")
    assert running.started_or_expected_at == at("2026-11-22T03:05:38")
    assert jobs["7"].started_or_expected_at == at("2026-11-22T04:05:38"), (
        "the start that is expected"
    )
    assert jobs["9"].started_or_expected_at is None
    assert jobs["12"].state.name == "PENDING"
    assert "/runs/exp/one" in running.names
    assert (jobs["2"].exit_code, jobs["3"].exit_code) == (3, 78), "from wait statuses"


def test_sacct_tells_every_start_and_the_failures_of_steps() -> None:
    rows = parse_sacct(SACCT)
    assert [job.state.name for job in rows if job.job_id == "17"] == ["PREEMPTED", "COMPLETED"]
    jobs = {job.job_id: job for job in rows}
    assert jobs["5"].state.name == "FAILED"
    assert "OUT_OF_MEMORY" in jobs["5"].failed_step_states
    assert (jobs["6"].nodes, jobs["6"].started_or_expected_at, jobs["6"].reason) == (
        "",
        None,
        "JobHeldUser",
    )
    assert jobs["13"].state.name == "CANCELLED"


def test_an_id_that_slurm_gave_to_somebody_else_does_not_count(tmp_path: Path) -> None:
    look = QueueSnapshot(squeue())
    own = partial(is_job_of_run, RunPaths(tmp_path / "exp" / "run"))
    another = partial(is_job_of_run, RunPaths(tmp_path / "another" / "run"))
    assert "1" in look.filter_jobs(["1"], own).jobs
    assert look.filter_jobs(["1"], another).jobs == {}
    assert look.filter_jobs(["404"], own).get_state("404").phase is JobPhase.UNKNOWN
    past = QueueSnapshot({job.job_id: job for job in parse_sacct(SACCT)})
    assert "4" in past.filter_jobs(["4"], own).jobs, "accounting may not know the name"


def test_an_accounting_that_was_off_is_asked_again_but_not_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, poller = ScriptedSlurm(tmp_path, monkeypatch), QueuePoller()
    slurm.answer("sacct", "echo 'sacct: error: Slurm accounting storage is disabled' >&2; exit 1")
    assert poller.read_accounting(["7"]) == []
    slurm.answer("sacct", "echo '7|FAILED|1:0|n04|Unknown|Unknown|None'")
    assert poller.read_accounting(["7"]) == []
    later = time.monotonic() + queue.ACCOUNTING_RETRY_INTERVAL_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    (found,) = poller.read_accounting(["7"])
    assert found.state.name == "FAILED"


@pytest.mark.parametrize(
    ("squeue", "outage"),
    [
        ("echo -e 'squeue: error: no DNS\\nsqueue: fatal: no configuration' >&2; exit 1", "fatal"),
        (None, "there is no squeue on this machine"),
    ],
)
def test_commands_say_what_the_run_directory_knows_whatever_squeue_says(
    squeue: str | None,
    outage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = RunPaths(tmp_path / "exp" / "one")
    script = tmp_path / "job.sbatch"
    script.write_text("")
    record_submission(paths.submissions, Submission("trainer", "7", 1, 0.0, str(script)))
    paths.recipe.write_text("trainer: {total_steps: 4}")
    paths.finished_marker.touch()
    if squeue is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        ScriptedSlurm(tmp_path, monkeypatch).answer("squeue", squeue)
    assert exit_code_of("status", paths.root) == 0
    said = capsys.readouterr().out
    assert said.startswith("exp/one: finished")
    assert outage in said
    assert exit_code_of("why", paths.root) == 0
    assert capsys.readouterr().out.startswith("the run is finished")
    paths.finished_marker.unlink()
    exit_code_of("why", paths.root)
    assert capsys.readouterr().out.startswith("Slurm does not answer (")
