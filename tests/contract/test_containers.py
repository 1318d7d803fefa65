"""Images hold the environments of the locks, where a job in a container looks for them.

Building them needs more than a test has, so pip is a stand-in that writes down what it was asked.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from areal_hpc.slurm.container import IMAGE_CHECKOUT_DIR, get_image_python
from tests.support.commands import run_program, write_program
from tests.support.environments import CHECKOUT

CONTAINERS = CHECKOUT / "slurm" / "containers"
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
        pins = ".venvs/serve/pins.txt" if role == "serve" else f"requirements/{role}.txt"
        assert any(str(tmp_path / pins) in line for line in asked)


def test_sglang_brings_its_own_pytorch_and_keeps_the_other_pins(tmp_path: Path) -> None:
    _, asked = install(tmp_path, "serve")
    lock = (CHECKOUT / "requirements" / "serve.txt").read_text().splitlines()
    pins = (tmp_path / ".venvs" / "serve" / "pins.txt").read_text().splitlines()
    assert [line for line in lock if line not in pins] == [
        line for line in lock if line.startswith("torch==")
    ]
    assert any(line.endswith("sglang==0.5.23") for line in asked)


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
