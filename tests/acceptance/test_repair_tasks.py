"""Tasks of Harbor: rewards of solutions, remains of a killed cell, and built images."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.dataset.harbor.image_build import build_task_images
from areal_hpc.sandbox.images import read_image
from areal_hpc.sandbox.runtimes import find_installed_runtimes
from examples.repair_tasks.make import write_repair_tasks
from tests.support.commands import areal_hpc, said_by
from tests.support.environments import CHECKOUT
from tests.support.process_commands import find_processes
from tests.support.root_file_system import make_root_file_system
from tests.support.run_files import events_of, trained_steps
from tests.support.small_run import SmallRun, await_none_left, interrupted_at_end
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(1500)

ISOLATIONS = ("bwrap", "podman", *({"apptainer"} & {*find_installed_runtimes()}))
GROUPS, STEPS = 5, 10
RUN_TIMEOUT_S = 1200.0
CHECK_TIMEOUT_S = 600.0
"""Time limit for fifty tasks, twice each."""


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_fifty_tasks_tell_their_solutions_from_nothing(isolation: str, tmp_path: Path) -> None:
    write_repair_tasks(tmp_path / "tasks", 50, seed=1)
    command = ("check-tasks", tmp_path / "tasks", "--isolation", isolation)
    checked = areal_hpc(*command, timeout_s=CHECK_TIMEOUT_S)
    assert checked.returncode == 0, checked.stdout
    *tasks, summary = checked.stdout.splitlines()
    assert summary.startswith("50 tasks, 0 whose tests")
    assert len(tasks) == 50
    assert all(line.split()[1:] == ["solution", "1", "nothing", "0"] for line in tasks), tasks


def start_run_on(tasks: Path, isolation: str, fileroot: Path, note: Path) -> SmallRun:
    """A run that plays each task in two real sandboxes, with a tiny model."""
    run = SmallRun(
        fileroot,
        "sft.total_steps=2",
        f"train_dataset={{path: {tasks}}}",
        f"valid_dataset={{path: {tasks}}}",
        f"evaluation.every_steps={STEPS + 1}",
        "rollout.workflow=tests.support.agents.Repairing",
        f"rollout.workflow_kwargs={{note: {note}}}",
        f"rollout.agent.isolation={isolation}",
        "rollout.n_samples=2",
        "rollout.max_concurrent_rollouts=8",
        "inference.context_length=2048",
        f"trainer.batch_size={GROUPS}",
        f"trainer.total_steps={STEPS}",
    )
    run.start()
    return run


def read_sandboxes(note: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in note.read_text().splitlines()] if note.exists() else []


def list_living(sandboxes: list[dict[str, Any]]) -> list[int]:
    """Processes of these sandboxes, as they were noted, that are still where they were."""
    living = []
    for sandbox in sandboxes:
        for pid in sandbox["pids"]:
            with contextlib.suppress(OSError):
                if str(Path(f"/proc/{pid}/ns/mnt").readlink()) in sandbox["namespaces"]:
                    living.append(pid)
    return living


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_cell_that_is_killed_leaves_nothing_of_its_sandboxes_and_loses_no_task(
    isolation: str, tmp_path: Path
) -> None:
    write_repair_tasks(tmp_path / "tasks", 50, seed=1)
    note = tmp_path / "note.jsonl"
    run = start_run_on(tmp_path / "tasks", isolation, tmp_path / "runs", note)
    with interrupted_at_end(run):
        run.await_true(lambda: trained_steps(run.paths) >= 3, RUN_TIMEOUT_S)
        first = read_sandboxes(note)[-1]["driver"]
        supervisors = find_processes("submitit", run.paths.jobs_dir / "cell-0")
        assert supervisors
        for process in supervisors:
            process.kill()
        wait_for(lambda: not Path(f"/proc/{first}").exists(), 20.0)
        killed = [row for row in read_sandboxes(note) if row["driver"] == first]
        assert killed[-1]["namespaces"]
        wait_for(lambda: not list_living(killed), 20.0)
        assert run.wait(RUN_TIMEOUT_S) == 0, run.said()
    assert len({row["driver"] for row in read_sandboxes(note)}) == 2
    submitted = [event["job"] for event in events_of(run.paths, "job_submitted")]
    assert submitted.count("cell-0") == 2
    assert run.audited() == f"trained_once={GROUPS * STEPS} duplicates=0 lost=0 open=0"
    await_none_left(run, 20.0)
    assert list_living(read_sandboxes(note)) == []
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(tmp_path) not in mounts
    assert "areal-hpc" not in mounts


RECIPE = """
experiment_name: built
trial_name: one
cluster: {{fileroot: {root}/runs}}
model: {{path: {root}}}
train_dataset: {{path: {root}/tasks}}
rollout: {{workflow: some.Agent, agent: {{isolation: podman}}}}
"""
CONTAINER_FILE = """FROM scratch
ADD base/ /
ENV COLOR=blue
WORKDIR /app
RUN echo built > made && rm /data/old/gone
COPY app/ /app/
"""
TEST = """#!/bin/sh
test "$COLOR $(pwd) $(cat /app/made)" = "blue /app built" || exit 1
test ! -e /data/old/gone && test -e /app/solved && result=1 || result=0
echo $result > /logs/verifier/reward.txt
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task whose image has to be built, from nothing that a registry would have."""
    subprocess.run([CHECKOUT / "scripts/install_sandbox_runtime.sh", "podman"], check=True)
    # Chroot: this machine may have control groups that no container program can use.
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    (folder,) = write_repair_tasks(tmp_path / "tasks", 1, seed=1)
    (folder / "environment/Dockerfile").write_text(CONTAINER_FILE)
    make_root_file_system(folder / "environment/base")
    (folder / "tests/test.sh").write_text(TEST)
    (folder / "solution/solve.sh").write_text("#!/bin/sh\ntouch /app/solved\n")
    for name in ("tests/test.sh", "solution/solve.sh"):
        (folder / name).chmod(0o755)
    return folder


def test_an_image_is_built_once_and_played(task: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(root=tmp_path))
    refused = areal_hpc("check-tasks", tmp_path / "tasks")
    assert "has to be built: RUN echo" in refused.stdout + refused.stderr
    output = said_by(areal_hpc("prefetch", tmp_path / "recipe.yaml", environ=dict(os.environ)))
    assert f"{task.name}: built image.tar" in output
    image = read_image(task / "environment/image.tar")
    assert image is not None
    assert (image.variables["COLOR"], image.work_dir) == ("blue", "/app")
    for isolation in ("bwrap", "podman"):
        checked = areal_hpc("check-tasks", tmp_path / "tasks", "--isolation", isolation)
        assert "solution 1     nothing 0" in said_by(checked)

    again = list[str]()
    build_task_images(tmp_path / "tasks", "train_dataset.path", again.append)
    assert again == []
    (task / "environment/app/more.py").write_text("")
    build_task_images(tmp_path / "tasks", "train_dataset.path", again.append)
    assert len(again) == 1
    for tag in {image.labels["areal-hpc.source"], _read_source(task)}:
        name = f"localhost/areal-hpc-task:{tag[:32]}"
        podman = shutil.which("podman")
        assert podman
        subprocess.run([podman, "rmi", "--force", name], check=True, capture_output=True)


def _read_source(task: Path) -> str:
    image = read_image(task / "environment/image.tar")
    assert image is not None
    return image.labels["areal-hpc.source"]
