"""A real supervisor of a cell that shares its job, while its storage fails for a moment."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from areal_hpc.rundir.jobs import (
    CellSpec,
    JobSpec,
    LaunchFile,
    ProcessSpec,
    read_task_exits,
)
from areal_hpc.rundir.paths import RunPaths
from tests.support.deadlines import scaled
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.slurm_launch import build_slurm_launch_info
from tests.support.waiting import wait_for

TASK = "import sys; from areal_hpc.jobs.supervisor import run_task; run_task(sys.argv[1])"
ACTORS = """
import sys
from pathlib import Path

def break_storage_and_crash(config):
    words, folder = Path(config["words"]), Path(config["folder"])
    if words.exists():
        words.write_text("began 2")
        return
    words.write_text("began 1")
    folder.rename(folder.with_name("away"))
    folder.touch()
    sys.exit(3)
"""


@pytest.fixture
def launch(tmp_path: Path) -> LaunchFile:
    """A job of one task, which works for one cell."""
    paths = RunPaths(tmp_path / "run")
    files = paths.job("cells-0-0")
    files.root.mkdir(parents=True)
    (tmp_path / "breaking_actors.py").write_text(ACTORS)
    config = {"words": str(tmp_path / "words"), "folder": str(paths.job("cell-0").root)}
    entry = "breaking_actors:break_storage_and_crash"
    driver = ProcessSpec("driver", "agents", entry, config, ends_job=True)
    told = build_slurm_launch_info(paths, "cells-0-0", least_free_bytes=1)
    launch = LaunchFile(
        JobSpec("cells-0-0", "agents", [], cells=[CellSpec("cell-0", [driver])]),
        job_dir=str(files.root),
        log_dir=str(paths.log_dir(1)),
        events=str(paths.events),
        pythons={"agents": sys.executable},
        variables={"agents": {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}},
        slurm=told,
    )
    files.launch.write_bytes(msgspec.json.encode(launch))
    return launch


@pytest.fixture
def supervisor(
    tmp_path: Path, launch: LaunchFile, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[bytes]]:
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    slurm.answer_about_jobs()
    told = {"JOB_ID": "7", "PROCID": "0", "NTASKS": "1", "LOCALID": "0", "NODEID": "0"}
    environ = {f"SLURM_{name}": value for name, value in told.items()}
    others = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    with (tmp_path / "supervisor.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", TASK, str(launch.paths.launch)],
            env={**others, **environ, "SLURMD_NODENAME": "n01"},
            stderr=log,
        )
    yield process
    process.kill()
    process.wait()


def test_a_cell_is_started_again_once_its_storage_answers(
    tmp_path: Path, launch: LaunchFile, supervisor: subprocess.Popen[bytes]
) -> None:
    """A file in the place of a folder is an error to write below, as a stale handle is."""
    folder, away = (launch.paths.root.with_name(name) for name in ("cell-0", "away"))
    log = tmp_path / "supervisor.log"
    wait_for(lambda: "shared storage does not respond" in log.read_text(), why=log.read_text)
    assert supervisor.poll() is None
    folder.unlink()
    away.rename(folder)
    assert supervisor.wait(scaled(60.0)) == 0
    assert (tmp_path / "words").read_text() == "began 2"
    assert read_task_exits(launch.paths)[0].exit_code == 0
