"""Output of Slurm's commands becomes jobs and states, of which a run selects its own."""

import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from areal_hpc.slurm.run_jobs import (
    find_original,
    is_job_of_run,
    list_live_jobs,
    was_cancelled_by_person,
)
from areal_hpc.slurm.scontrol import parse_job_facts
from areal_hpc.slurm.states import (
    INVALID_DEPENDENCY_REASON,
    STATE_BY_NAME,
    JobPhase,
    explain_reason,
    parse_state,
)
from areal_hpc.view.state.jobs import build_run_jobs, fetch_run_jobs, format_jobs
from tests.support.commands import exit_code_of
from tests.support.environments import CHECKOUT
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
    """Format a row as wide as squeue prints it."""
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


def test_accounting_is_asked_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, poller = ScriptedSlurm(tmp_path, monkeypatch), QueuePoller()
    slurm.answer("sacct", "echo 'sacct: error: Slurm accounting storage is disabled' >&2; exit 1")
    assert poller.read_accounting(["7"]) == []
    slurm.answer("sacct", "echo '7|FAILED|1:0|n04|Unknown|Unknown|None'")
    assert poller.read_accounting(["7"]) == []
    later = time.monotonic() + queue.ACCOUNTING_RETRY_INTERVAL_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    (record,) = poller.read_accounting(["7"])
    assert record.state.name == "FAILED"


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
    output = capsys.readouterr().out
    assert output.startswith("exp/one: finished")
    assert outage in output
    assert exit_code_of("why", paths.root) == 0
    assert capsys.readouterr().out.startswith("the run is finished")
    paths.finished_marker.unlink()
    exit_code_of("why", paths.root)
    assert capsys.readouterr().out.startswith("Slurm does not answer (")


def test_what_slurm_shows_of_a_job_is_read() -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1795318302))
    shown = f"JobId=7 JobState=RUNNING Reason=None EndTime={end} ExcNodeList=n[01-02] A=b"
    facts = parse_job_facts(shown)
    assert (facts.state, facts.ends_at) == ("RUNNING", 1795318302.0)
    assert facts.excluded_nodes == "n[01-02]"
    facts = parse_job_facts("JobId=7 JobState=COMPLETING EndTime=Unknown ExcNodeList=(null)")
    assert (facts.state, facts.ends_at, facts.excluded_nodes) == ("COMPLETING", None, "")
    assert not facts.is_preempted
    assert not parse_job_facts("JobId=7 JobState=RUNNING PreemptTime=None").is_preempted
    assert parse_job_facts("JobId=7 JobState=RUNNING PreemptTime=2026-11-22T07:12:13").is_preempted


WORDS = (CHECKOUT / "tests" / "golden" / "slurm" / "words.txt").read_text().splitlines()
"""Kind, word, and the first and last release of 22.05 to 26.05 whose sources have it."""


def words(kind: str) -> list[str]:
    return [word for word_kind, word, *_ in map(str.split, WORDS) if word_kind == kind]


def test_every_state_of_slurms_sources_is_known() -> None:
    assert sorted(STATE_BY_NAME) == sorted(words("state"))


def test_every_reason_for_waiting_of_slurms_sources_is_explained() -> None:
    never_given = {"BlockFreeAction", "BlockMaxError"}  # of BlueGene, whose code is gone
    unknown = {word for word in words("reason") if explain_reason(word).meaning.endswith(word)}
    assert unknown == never_given


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("RUNNING", "RUNNING"),
        ("CANCELLED by 1000", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY"),
        ("PENDING,REQUEUED", "PENDING"),
        (" node_fail ", "NODE_FAIL"),
    ],
)
def test_what_commands_add_to_a_state_is_understood(printed: str, name: str) -> None:
    assert parse_state(printed).name == name


@pytest.mark.parametrize("printed", ["", "BREWING", "C+", "RE+", "+"])
def test_a_state_that_nobody_knows_is_of_no_known_phase(printed: str) -> None:
    state = parse_state(printed)
    assert state.phase is JobPhase.UNKNOWN
    assert not state.is_over_without_success
    assert "not known" in state.meaning


def test_only_what_is_over_without_success_is_a_failure() -> None:
    failures = {name for name, state in STATE_BY_NAME.items() if state.is_over_without_success}
    assert {"CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", "NODE_FAIL"} <= failures
    alive = {name for name, state in STATE_BY_NAME.items() if state.phase is not JobPhase.OVER}
    assert failures.isdisjoint({"COMPLETED", *alive})


@pytest.mark.parametrize(
    ("printed", "begins"),
    [
        ("Resources", "waiting for free nodes"),
        ("(Priority)", "jobs of higher priority are ahead"),
        ("JobHeldUser", "its user holds it"),
        ("launch failed requeued held", "its last start failed on a node"),
        ("launch_failed_requeued_held", "its last start failed on a node"),
        ("ReqNodeNotAvail, UnavailableNodes:n07", "nodes that it needs are down"),
        ("Nodes required for job are DOWN, DRAINED or reserved", "nodes that it needs are down"),
        ("QOSMaxJobsPerUserLimit", "it would exceed a limit"),
        ("QOSMaxCpuPerUserLimit", "it would exceed a limit"),
        ("MaxMemPerLimit", "it asks for more, or less, than"),
        ("QOSMaxWallDurationPerJobLimit", "it asks for more, or less, than"),
        ("AssocMaxNodePerJobLimit", "it asks for more, or less, than"),
        ("QOSMaxGRESPerNode", "it asks for more, or less, than"),
        ("QOSMinGRES", "it asks for more, or less, than"),
        ("QOSGrpGRES", "your group uses all"),
        ("AssocGrpCpuLimit", "your group uses all"),
        ("MoonIsFull", "Slurm's reason is MoonIsFull"),
        ("", "Slurm's reason is not given"),
    ],
)
def test_reasons_are_said_in_words(printed: str, begins: str) -> None:
    assert explain_reason(printed).meaning.startswith(begins)


def test_what_follows_a_reason_is_kept_and_what_needs_somebody_is_marked() -> None:
    assert "UnavailableNodes:n07" in explain_reason("ReqNodeNotAvail, UnavailableNodes:n07").meaning
    needs_action = {
        "JobHeldUser": True,
        "Priority": False,
        "QOSMaxWallDurationPerJobLimit": True,
        "MaxMemPerLimit": True,
        "QOSMaxJobsPerUserLimit": False,
        "AssocGrpNodeLimit": False,
    }
    assert {name: explain_reason(name).needs_action for name in needs_action} == needs_action


@given(st.text(max_size=60))
def test_no_text_is_too_strange_to_be_a_state_or_a_reason(text: str) -> None:
    assert parse_state(text).name
    assert explain_reason(text).meaning


@pytest.mark.parametrize(
    ("state", "reason", "is_held"),
    [
        ("PENDING", "JobHeldUser", True),
        ("PENDING", "job requeued in held state", True),
        ("REQUEUE_HOLD", "job_requeued_in_held_state", True),
        ("PENDING", "JobHeldAdmin", False),
        ("PENDING", "Priority", False),
        ("RUNNING", "None", False),
    ],
)
def test_a_job_that_held_itself_waits_for_its_user_as_one_that_was_submitted_held_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, is_held: bool
) -> None:
    paths = RunPaths(tmp_path / "quickstart" / "one")
    record_submission(paths.submissions, Submission("trainer", "7", 1, 0.0, ""))
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    row = f"7|{state}|{reason}||N/A|N/A|0|0|quickstart-one-trainer.01234567||"
    slurm.answer("squeue", f'case "$*" in *--jobs=7) echo "{row}";; esac')
    (job,) = list_live_jobs(paths)
    assert job.is_held == is_held


def test_a_copy_of_a_folder_has_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, copy = (RunPaths(tmp_path / "quickstart" / name) for name in ("one", "two words"))
    for paths in (original, copy):
        record_submission(paths.submissions, Submission("trainer", "7", 1, 0.0, ""))
        paths.recipe.touch()
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    row = f"7|RUNNING|None|n01|N/A|N/A|0|0|quickstart-one-trainer.01234567|{original.root} token=1|"
    slurm.answer("squeue", f'case "$*" in *--jobs=7) echo "{row}";; esac')
    assert [job.submission.job_id for job in list_live_jobs(original)] == ["7"]
    assert list_live_jobs(copy) == []
    assert (find_original(original), find_original(copy)) == (None, original.root)
    status = fetch_run_jobs(copy, QueuePoller())
    assert f"a copy of {original.root}" in "\n".join(format_jobs(status))
    answer = QueuePoller().poll(["7"])
    stranger = RunPaths(tmp_path / "quickstart" / "stranger")
    record_submission(stranger.submissions, Submission("trainer", "8", 1, 0.0, ""))
    assert build_run_jobs(stranger, answer).original is None, "one answer is about many runs"
    original.root.rename(copy.root.with_name("moved"))
    original.root.symlink_to(copy.root.with_name("moved"))
    moved = RunPaths(copy.root.with_name("moved"))
    assert find_original(moved) is None, "its old place leads here"
    assert [job.submission.job_id for job in list_live_jobs(moved)] == ["7"]
    original.root.unlink()
    moved.root.rename(original.root)
    original.root.rename(tmp_path / "quickstart" / "gone")
    assert [job.submission.job_id for job in list_live_jobs(copy)] == ["7"], "moved, not copied"


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
    assert was_cancelled_by_person(job, QueuePoller(), owner) is is_by_person


@pytest.mark.parametrize(("state", "is_by_person"), [("CANCELLED", False), ("RUNNING", True)])
def test_of_what_slurm_cancels_by_itself_accounting_names_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_by_person: bool
) -> None:
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.answer("sacct", f"echo '7|{state}|0:0|None assigned|Unknown|Unknown|None'")
    job = SlurmJobRecord("7", parse_state("CANCELLED"))
    assert was_cancelled_by_person(job, QueuePoller(), OWNER) is is_by_person


def test_who_cancelled_without_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedSlurm(tmp_path, monkeypatch).answer("sacct", "exit 1")
    job = SlurmJobRecord("7", parse_state("CANCELLED"))
    assert was_cancelled_by_person(job, QueuePoller(), OWNER)
    assert not was_cancelled_by_person(
        SlurmJobRecord("7", parse_state("FAILED")), QueuePoller(), OWNER
    )
    unmet = SlurmJobRecord("7", parse_state("CANCELLED"), INVALID_DEPENDENCY_REASON)
    assert not was_cancelled_by_person(unmet, QueuePoller(), OWNER)
