"""`areal-hpc prefetch` builds images of Harbor's tasks without a daemon, and they are played."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from areal_hpc.dataset.harbor.image_build import build_task_images
from areal_hpc.sandbox.images.oci_image import read_image
from examples.repair_tasks.make import write_repair_tasks
from tests.support.commands import areal_hpc, said_by
from tests.support.environments import CHECKOUT
from tests.support.root_file_system import make_root_file_system

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
    said = said_by(areal_hpc("prefetch", tmp_path / "recipe.yaml", environ=dict(os.environ)))
    assert f"{task.name}: built image.tar" in said
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
