"""Submissions whose answers are lost, and dependents of a job that has a new id."""

from pathlib import Path

import pytest

from areal_hpc.errors import SlurmNotFoundError, SlurmTimeoutError
from areal_hpc.slurm import script_submission
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.script_submission import (
    JobIdentity,
    is_temporary_refusal,
    rewrite_dependency,
    submit_script,
)
from tests.support.scripted_slurm import ScriptedSlurm

SILENCE = "echo sbatch: error: Batch job submission failed: Socket timed out >&2; exit 1"
IDENTITY = JobIdentity("run-trainer", "/runs/one", "0a1b2c3d")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSlurm:
    for name in ("JOB_LOOKUP_DURATION_S", "RETRY_PAUSE_S"):
        monkeypatch.setattr(script_submission, name, 0.0)
    return ScriptedSlurm(tmp_path, monkeypatch)


def test_a_submission_that_only_squeue_answers_is_given_up_in_time(slurm: ScriptedSlurm) -> None:
    slurm.answer("squeue", "true")
    slurm.answer("sbatch", f"[ $(grep -c ^sbatch $CALLS) -gt 200 ] && echo 9 || {{ {SILENCE}; }}")
    with pytest.raises(SlurmTimeoutError, match="Socket timed out"):
        submit_script(Path("job.sbatch"), IDENTITY, timeout_s=0.3)
    slurm.answer("squeue", f"echo '8 run-trainer.{IDENTITY.token} /runs/one'")
    assert submit_script(Path("job.sbatch"), IDENTITY, timeout_s=0.0) == "8", "it was accepted"


def test_a_users_filters_hide_no_job(slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "SQUEUE_PARTITION": "debug",
        "SCANCEL_STATE": "PENDING",
        "SLURM_TIME_FORMAT": "%s",
        "SBATCH_ACCOUNT": "ours",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    slurm.answer("squeue", "env")
    seen = run_slurm_command("squeue").splitlines()
    assert [name for name in variables if any(line.startswith(f"{name}=") for line in seen)] == [
        "SLURM_TIME_FORMAT",
        "SBATCH_ACCOUNT",
    ]
    assert "SLURM_TIME_FORMAT=standard" in seen


def test_a_command_that_this_node_cannot_start_now_is_silence(
    slurm: ScriptedSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments take more room than a process may have, as if no process could start."""
    slurm.answer("squeue", "true")
    with pytest.raises(SlurmTimeoutError, match="squeue could not be started: Argument list"):
        run_slurm_command("squeue", "x" * (1 << 20))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmNotFoundError):
        run_slurm_command("squeue")


POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("text", "is_temporary"),
    [
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: {POLICY}", True),
        (f"sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: {POLICY}", True),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: {POLICY}", False),
        (f"sbatch: error: {POLICY}", True),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition", False),
        ("Resource temporarily unavailable", True),
    ],
)
def test_a_limit_of_jobs_passes_by_itself_and_others_do_not(text: str, is_temporary: bool) -> None:
    assert is_temporary_refusal(text) == is_temporary


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("afterok:12", "afterok:99"),
        ("afterok:120,afterany:12", "afterok:120,afterany:12"),
        ("afterok:7,afterok:12", "afterok:7,afterok:99"),
        ("afternotok:12,afterok:12", "afternotok:12,afterok:99"),
        ("", ""),
    ],
)
def test_only_the_old_number_of_a_dependency_changes(before: str, after: str) -> None:
    assert rewrite_dependency(before, "12", "99") == after
