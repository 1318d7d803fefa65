"""Jobs of a run as squeue has them: which are its own, held by their user, cancelled by whom."""

from pathlib import Path

import pytest

from areal_hpc.rundir.jobs import Submission, record_submission
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller, SlurmJobRecord
from areal_hpc.slurm.run_jobs import (
    find_original,
    list_live_jobs,
    was_cancelled_by_person,
)
from areal_hpc.slurm.states import INVALID_DEPENDENCY_REASON, parse_state
from areal_hpc.view.state.jobs import (
    build_run_jobs,
    fetch_run_jobs,
    format_jobs,
)
from tests.support.scripted_slurm import ScriptedSlurm


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


def test_the_jobs_of_a_run_are_not_those_of_a_copy_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_without_accounting_cancellations_are_a_persons_but_for_unmet_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ScriptedSlurm(tmp_path, monkeypatch).answer("sacct", "exit 1")
    job = SlurmJobRecord("7", parse_state("CANCELLED"))
    assert was_cancelled_by_person(job, QueuePoller(), OWNER)
    assert not was_cancelled_by_person(
        SlurmJobRecord("7", parse_state("FAILED")), QueuePoller(), OWNER
    )
    unmet = SlurmJobRecord("7", parse_state("CANCELLED"), INVALID_DEPENDENCY_REASON)
    assert not was_cancelled_by_person(unmet, QueuePoller(), OWNER)
