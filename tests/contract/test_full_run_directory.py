"""A supervisor under Slurm whose run directory takes no files as its job starts."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jobs import JobSpec, LaunchFile, ProcessSpec, SlurmLaunchInfo, read_task_exits
from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.scripted_slurm import ScriptedSlurm

TASK = "import sys; from areal_hpc.jobs.supervisor import run_task; run_task(sys.argv[1])"
TOLD = {"JOB_ID": "7", "PROCID": "0", "NTASKS": "1", "LOCALID": "0", "NODEID": "0"}


def test_a_job_that_cannot_write_the_files_of_its_processes_says_so_and_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in the place of a file takes no content, as a full disk does."""
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    slurm.answer_about_jobs("requeue) echo PENDING > $STATE")
    paths = RunPaths(tmp_path / "run")
    files = paths.job("trainer")
    (files.process_config("trainer") / "in the way").mkdir(parents=True)
    launch = LaunchFile(
        JobSpec("trainer", "train", [ProcessSpec("trainer", "train", "none:none", {})]),
        job_dir=str(files.root),
        log_dir=str(paths.log_dir(1)),
        events=str(paths.events),
        pythons={"train": sys.executable},
        stop_grace_s=0.1,
        slurm=SlurmLaunchInfo(least_free_bytes=1, margin_s=0.1),
    )
    files.launch.write_bytes(msgspec.json.encode(launch))
    others = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    environ = {f"SLURM_{name}": value for name, value in TOLD.items()}
    command = [sys.executable, "-c", TASK, str(files.launch)]
    ended = subprocess.run(
        command,
        env={**others, **environ, "SLURMD_NODENAME": "n01"},
        check=False,
        timeout=scaled(60),
    )
    assert ended.returncode == ClusterError.exit_code
    reason = read_task_exits(files)[0].reason
    assert reason.startswith("the task could not start: ")
    assert reason.endswith("quota and permissions of the run directory (requeued)")
    assert slurm.list_calls("scontrol requeue") == ["scontrol requeue 7"]
