"""scripts/setup.sh: once, again after a change or a failure, and clear words when it cannot.

The base Python is a stand-in, a shell script that writes down what it was asked: the real
installation takes minutes and needs a package index.
"""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.support.environments import CHECKOUT

ROLES = ("serve", "train", "agents")
ENVIRONMENTS = (*ROLES, "frameworks", "camel")
FRAMEWORKS = ["openai-agents", "langchain", "anthropic"]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

STAND_IN = r"""#!/bin/bash
echo "$*" >>"$ASKED"
case "$*" in
  *"import ensurepip"*) echo "$0" ;;
  "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip install --no-deps -r "*)
    sleep "${PIP_TAKES_S:-0}"
    [ ! -e "$PIP_FAILS" ] || { echo "no such wheel"; exit 1; } ;;
esac
"""


class Tree:
    """A checkout with small locks, and the stand-in as its base Python."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self.asked = root / "asked"
        self.pip_fails = root / "pip-fails"
        self.python = root / "python"
        (self.root / "requirements").mkdir(parents=True)
        shutil.copytree(CHECKOUT / "scripts", self.root / "scripts")
        for role in ENVIRONMENTS:
            self.lock(role).write_text("numpy==2.0.0\n")
        (self.root / "pyproject.toml").touch()
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def lock(self, role: str) -> Path:
        return self.root / "requirements" / f"{role}.txt"

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environ = {
            **os.environ,
            "AREAL_HPC_PYTHON": str(self.python),
            "ASKED": str(self.asked),
            "PIP_FAILS": str(self.pip_fails),
            **variables,
        }
        return subprocess.Popen(
            [self.root / "scripts" / "setup.sh", *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_up(self, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(*arguments, **variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def builds(self) -> list[str]:
        """Roles whose environment was made from nothing, in order."""
        return re.findall(r"-m venv --clear \S+/(\w+)$", self.asked.read_text(), re.MULTILINE)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_second_set_up_does_nothing(tree: Tree) -> None:
    code, output = tree.set_up()
    assert code == 0, output
    assert tree.builds() == list(ROLES)
    assert re.findall(r"(\w+) +ready in \d+ s", output) == list(ROLES)
    asked = tree.asked.read_text()
    assert tree.set_up("all") == (0, "")
    assert tree.asked.read_text() == asked


def test_the_frameworks_are_set_up_for_tests_only(tree: Tree) -> None:
    tree.set_up()
    assert tree.set_up("tests")[0] == 0
    assert tree.builds() == list(ENVIRONMENTS)


def test_one_role_can_be_set_up_alone(tree: Tree) -> None:
    assert tree.set_up("agents")[0] == 0
    assert tree.builds() == ["agents"]


def test_a_changed_lock_builds_its_environment_again(tree: Tree) -> None:
    tree.set_up()
    tree.lock("train").write_text("numpy==2.0.1\n")
    tree.set_up()
    assert tree.builds() == [*ROLES, "train"]


def test_a_changed_pyproject_only_renews_the_package_itself(tree: Tree) -> None:
    tree.set_up("train")
    stamp = tree.root / ".venvs" / "train" / ".installed"
    os.utime(stamp, (1, 1))
    asked = tree.asked.read_text()
    tree.set_up("train")
    renewed = tree.asked.read_text().removeprefix(asked)
    assert "--no-build-isolation -e" in renewed
    assert "venv --clear" not in renewed


def test_a_failed_set_up_shows_why_and_the_next_one_repairs_it(tree: Tree) -> None:
    tree.pip_fails.touch()
    code, output = tree.set_up("agents")
    assert code == 78
    assert "no such wheel" in output
    assert "agents environment is not complete" in output
    tree.pip_fails.unlink()
    assert tree.set_up("agents")[0] == 0
    assert tree.builds() == ["agents", "agents"]


def test_two_set_ups_at_once_build_once(tree: Tree) -> None:
    both = [tree.start("agents", PIP_TAKES_S="0.5") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert tree.builds() == ["agents"]


def test_a_terminated_set_up_stops_its_installer(tree: Tree) -> None:
    process = tree.start("agents", PIP_TAKES_S="60")
    while not (tree.asked.exists() and "-m pip install --no-deps -r" in tree.asked.read_text()):
        time.sleep(0.02)
    process.terminate()
    # The output's pipe closes only when every process that holds it is gone.
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert tree.set_up("agents")[0] == 0
    assert tree.builds() == ["agents", "agents"]


def test_a_missing_python_is_named_with_the_command_that_installs_it(tree: Tree) -> None:
    code, output = tree.set_up(AREAL_HPC_PYTHON="/nowhere/python3.11")
    assert code == 78
    assert "/nowhere/python3.11" in output
    assert "python3.11-venv" in output


def test_missing_system_packages_are_named(tree: Tree, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in (
        "bash",
        "cat",
        "cut",
        "dirname",
        "env",
        "getconf",
        "head",
        "mkdir",
        "sha256sum",
        "sort",
        "tail",
        "uname",
    ):
        found = shutil.which(name)
        assert found
        (commands / name).symlink_to(found)
    code, output = tree.set_up(PATH=str(commands))
    assert code == 78
    assert "missing system packages: make gcc util-linux" in output


def test_another_architecture_is_refused(tree: Tree, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "uname").write_text('#!/bin/sh\n[ "$1" = -s ] && echo Linux || echo aarch64\n')
    (commands / "uname").chmod(0o755)
    code, output = tree.set_up(PATH=f"{commands}:{os.environ['PATH']}")
    assert code == 78
    assert "this is Linux on aarch64" in output


def test_an_unknown_role_is_refused(tree: Tree) -> None:
    code, output = tree.set_up("serving")
    assert code == 78
    assert "serve|train|agents|frameworks|camel|all|tests" in output


def locked(role: str) -> dict[str, str]:
    """Package -> version of a lock."""
    lines = (CHECKOUT / "requirements" / f"{role}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {normal(name): version for name, version in pins}


@pytest.mark.parametrize("role", [*ENVIRONMENTS, "harnesses"])
def test_a_lock_pins_public_versions(role: str) -> None:
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in locked(role).values())


def test_the_lock_of_npm_pins_what_the_public_registry_has() -> None:
    lock = json.loads((CHECKOUT / "requirements" / "harnesses" / "package-lock.json").read_text())
    packages = [package for path, package in lock["packages"].items() if path]
    assert packages
    for package in packages:
        assert package["resolved"].startswith("https://registry.npmjs.org/")
        assert package["integrity"].startswith("sha512-")


def normal(name: str) -> str:
    """One spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """What pyproject.toml asks for, always and with the extras named."""
    requirements = [*PROJECT["dependencies"]]
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    return {normal(re.split(r"[<>=\[]", line)[0]) for line in requirements}


@pytest.mark.parametrize(
    ("role", "extras"),
    [
        ("train", ["train", "dev"]),
        ("agents", ["agents"]),
        ("frameworks", FRAMEWORKS),
        ("camel", ["camel"]),
    ],
)
def test_a_lock_holds_what_the_package_declares(role: str, extras: list[str]) -> None:
    assert declared(*extras) <= locked(role).keys()


def test_everything_imported_is_declared() -> None:
    imported: set[str] = set()
    for path in (CHECKOUT / "areal_hpc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    origins = {
        **importlib.metadata.packages_distributions(),
        "sglang": ["sglang"],  # not in the environment of the tests
        "camel": ["camel-ai"],  # nor are these
        "agents": ["openai-agents"],
        "langchain": ["langchain"],
        "langchain_core": ["langchain"],  # which is made of it
        "langchain_openai": ["langchain-openai"],
        "pydantic_core": ["pydantic"],  # a part of pydantic, which pins it exactly
    }
    foreign = imported - sys.stdlib_module_names - {"areal_hpc"}
    allowed = declared("serve", "train", "agents", "camel", *FRAMEWORKS)
    assert [
        name for name in sorted(foreign) if not allowed & {normal(d) for d in origins.get(name, [])}
    ] == []


def test_the_exact_pins_of_the_extras_are_those_of_the_locks() -> None:
    for role in ("serve", "train"):
        pins = [line.split("==") for line in PROJECT["optional-dependencies"][role] if "==" in line]
        assert pins
        assert {name: locked(role)[name] for name, _ in pins} == dict(pins)
