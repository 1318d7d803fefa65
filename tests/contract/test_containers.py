"""Images hold the environments of the locks, where a job in a container looks for them.

Building them needs more than a test has, so pip is a stand-in that writes down what it was asked.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from areal_hpc.slurm.batch_script.container import IMAGE_CHECKOUT_DIR, get_image_python
from tests.support.agents_table import read_pins
from tests.support.commands import run_program, write_program
from tests.support.environments import CHECKOUT

CONTAINERS = CHECKOUT / "slurm" / "containers"
GPU_ROLES = ("serve", "train")
ROLES = {"train": ["train"], "serve": ["serve", "agents"]}
STAND_IN = r"""
echo "$*" >>"$ASKED"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
"""


def install(root: Path, *roles: str) -> tuple[int, list[str]]:
    """Run install.sh in a copy of the checkout's locks; its exit code and what pip was asked."""
    shutil.copytree(CHECKOUT / "requirements", root / "requirements")
    python, asked = write_program(root / "python3", STAND_IN), root / "asked"
    asked.touch()
    told = {"PYTHON": python, "ASKED": asked, "AREAL_HPC_ROOT": root}
    environ = {**os.environ, **{name: str(path) for name, path in told.items()}}
    ended = run_program("bash", CONTAINERS / "install.sh", *roles, environ=environ)
    return ended.returncode, asked.read_text().splitlines()


@pytest.mark.parametrize("roles", ROLES.values())
def test_every_role_gets_an_environment_from_its_lock(tmp_path: Path, roles: list[str]) -> None:
    code, asked = install(tmp_path, *roles)
    assert code == 0
    for role in roles:
        assert (tmp_path / Path(get_image_python(role)).relative_to(IMAGE_CHECKOUT_DIR)).is_file()
        lock = "requirements/agents.txt" if role == "agents" else f"requirements/gpu/{role}.txt"
        assert any(
            line.endswith(f"--no-deps --require-hashes --requirement {tmp_path / lock}")
            for line in asked
        )


def test_trainer_and_servers_have_one_torch_and_one_nccl() -> None:
    """NCCL refuses a peer of another version, and processes of both meet in update groups."""
    serve, train = (read_pins(CHECKOUT / "requirements/gpu" / f"{role}.txt") for role in GPU_ROLES)
    for package in ("torch", "nvidia-nccl-cu13", "triton"):
        assert serve[package] == train[package]


@pytest.mark.parametrize("role", GPU_ROLES)
def test_a_gpu_has_the_packages_that_the_cpu_was_tested_with(role: str) -> None:
    gpu = read_pins(CHECKOUT / "requirements/gpu" / f"{role}.txt")
    cpu = read_pins(CHECKOUT / "requirements" / f"{role}.txt")
    assert [name for name, version in cpu.items() if gpu.get(name) != version] == ["torch"]


@pytest.mark.parametrize("definition", ["Dockerfile", "serve.def", "train.def"])
def test_images_have_the_libraries_of_rdma(definition: str) -> None:
    text = (CONTAINERS / definition).read_text()
    assert all(name in text for name in ("libibverbs1", "ibverbs-providers", "rdma-core"))


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    assert install(tmp_path, "nonsense")[0] == 78


@pytest.mark.parametrize("image", ROLES)
def test_definitions_install_the_roles_of_their_image(image: str) -> None:
    definition = (CONTAINERS / f"{image}.def").read_text()
    assert re.search(rf"install\.sh {' '.join(ROLES[image])}$", definition, re.MULTILINE)
    copied = re.findall(r"^ +(\S+) (/opt/\S+)$", definition, re.MULTILINE)
    assert ("requirements", f"{IMAGE_CHECKOUT_DIR}/requirements") in copied
    for source, place in copied:
        assert (CHECKOUT / source).exists()
        assert place == f"{IMAGE_CHECKOUT_DIR}/{source}"


def test_the_dockerfile_copies_what_the_definitions_copy() -> None:
    dockerfile = (CONTAINERS / "Dockerfile").read_text()
    definition = (CONTAINERS / "train.def").read_text()
    for source in re.findall(r"^ +(\S+) /opt/\S+$", definition, re.MULTILINE):
        assert re.search(rf"^COPY (.* )?{re.escape(source)} ", dockerfile, re.MULTILINE), source
    bases = {re.search(r"nvidia/cuda\S+", text)[0] for text in (dockerfile, definition)}  # type: ignore[index]
    assert len(bases) == 1
