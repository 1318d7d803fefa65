"""scripts/setup.sh: once, again after a change or a failure, and clear words when it cannot.

The base Python is a stand-in, a shell script that writes down what it was asked: the real
installation takes minutes and needs a package index.
"""

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from areal_hpc.agents.harness import installation
from areal_hpc.agents.harness.installation import PACKAGE_LOCKS_DIR
from areal_hpc.agents.harness.programs import HARNESSES
from areal_hpc.errors import ClusterError
from tests.support.agents_table import locked, normal
from tests.support.commands import only_programs, write_program
from tests.support.environments import CHECKOUT
from tests.support.package_sources import sources
from tests.support.waiting import wait_for

ROLES = ("serve", "train", "agents")
ENVIRONMENTS = (*ROLES, "frameworks", "camel")
GYMS = tuple(f"gyms/{path.stem}" for path in (CHECKOUT / "requirements/gyms").glob("*.txt"))
FRAMEWORKS = ["openai-agents", "langchain", "anthropic"]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

STAND_IN = r"""
echo "$*" >>"$ASKED"
case "$*" in
  *"import ensurepip"*) echo "$0" ;;
  "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip install --no-deps --require-hashes -r "*)
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
        self.python = write_program(root / "python", STAND_IN)
        (self.root / "requirements").mkdir(parents=True)
        shutil.copytree(CHECKOUT / "scripts", self.root / "scripts")
        for role in ENVIRONMENTS:
            self.lock(role).write_text("numpy==2.0.0\n")
        (self.root / "pyproject.toml").touch()

    def lock(self, role: str) -> Path:
        return self.root / "requirements" / f"{role}.txt"

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        told = {"AREAL_HPC_PYTHON": self.python, "ASKED": self.asked, "PIP_FAILS": self.pip_fails}
        return subprocess.Popen(
            [self.root / "scripts" / "setup.sh", *arguments],
            env={**os.environ, **{name: str(path) for name, path in told.items()}, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def set_up(self, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(*arguments, **variables)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def refused(self, *arguments: str, **variables: str) -> str:
        """What it says when it cannot."""
        code, output = self.set_up(*arguments, **variables)
        assert code == 78, output
        return output

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
    assert tree.set_up("tests")[0] == 0  # they alone need the frameworks
    assert tree.builds() == list(ENVIRONMENTS)


def test_environments_with_cuda_are_made_on_request_and_left_alone(tree: Tree) -> None:
    tree.lock("gpu/train").parent.mkdir()
    for role in ("serve", "train"):
        tree.lock(f"gpu/{role}").write_text("numpy==2.0.0\nnvidia-nccl-cu13==2.30.7\n")
    tree.set_up()
    code, output = tree.set_up("gpu")
    assert code == 0, output
    assert tree.builds() == [*ROLES, "serve", "train"]  # those of the agents need no CUDA
    asked = tree.asked.read_text()
    assert f"--no-deps --require-hashes -r {tree.lock('gpu/serve')}" in asked
    assert tree.set_up("gpu") == tree.set_up("all") == (0, "")
    tree.lock("gpu/train").write_text("numpy==2.0.1\n")
    tree.set_up("gpu")
    assert tree.builds()[-1] == "train"


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
    output = tree.refused("agents")
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
    asked = tree.asked
    wait_for(
        lambda: (
            asked.exists() and "-m pip install --no-deps --require-hashes -r" in asked.read_text()
        )
    )
    process.terminate()
    # The output's pipe closes only when every process that holds it is gone.
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert tree.set_up("agents")[0] == 0
    assert tree.builds() == ["agents", "agents"]


def test_a_missing_python_is_named_with_the_command_that_installs_it(tree: Tree) -> None:
    output = tree.refused(AREAL_HPC_PYTHON="/nowhere/python3.11")
    assert "/nowhere/python3.11" in output
    assert "python3.11-venv" in output


def test_missing_system_packages_are_named(tree: Tree, tmp_path: Path) -> None:
    basic = "bash cat cut dirname env getconf head mkdir sha256sum sort tail uname"
    (tmp_path / "bin").mkdir()
    output = tree.refused(PATH=only_programs(tmp_path / "bin", *basic.split()))
    assert "missing system packages: make gcc util-linux" in output


def test_another_architecture_is_refused(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "uname", '[ "$1" = -s ] && echo Linux || echo aarch64')
    output = tree.refused(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert "this is Linux on aarch64" in output


def test_an_unknown_role_is_refused(tree: Tree) -> None:
    assert "serve|train|agents|frameworks|camel|all|tests" in tree.refused("serving")


@pytest.mark.parametrize("role", [*ENVIRONMENTS, "harnesses", *GYMS])
def test_a_lock_pins_public_versions(role: str) -> None:
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in locked(role).values())


PYPI_LOCKS = [
    str(path.relative_to(CHECKOUT)) for path in sorted((CHECKOUT / "requirements").rglob("*.txt"))
]


@pytest.mark.parametrize("lock", PYPI_LOCKS)
def test_every_package_of_a_lock_has_hashes(lock: str) -> None:
    text = re.sub(r"^#.*\n", "", (CHECKOUT / lock).read_text(), flags=re.MULTILINE)
    packages = re.split(r"\n(?=\S)", text.strip())
    pin = r"[\w.-]+==[\w.+]+( \\\n    --hash=sha256:[0-9a-f]{64})+"
    assert [one for one in packages if not re.fullmatch(pin, one)] == []


def test_the_torch_for_cpus_is_that_of_the_locks() -> None:
    (version,) = re.findall(
        r"^torch==(\S+)", (CHECKOUT / "requirements/torch-cpu.txt").read_text(), re.MULTILINE
    )
    assert {f"{locked(role)['torch']}+cpu" for role in ("train", "serve")} == {version}


def test_a_package_with_other_content_than_its_lock_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, wheels = tmp_path / "locks", tmp_path / "wheels"
    (locks / "mini-swe-agent").mkdir(parents=True)
    right = write_wheel(wheels, "mini_swe_agent")
    monkeypatch.setattr(installation, "PACKAGE_LOCKS_DIR", locks)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    lock = locks / "mini-swe-agent" / "requirements.txt"
    lock.write_text(f"mini-swe-agent==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ClusterError, match="update the hashes"):
        installation.install_harness_if_outdated("mini-swe-agent", tmp_path / "harnesses")
    lock.write_text(f"mini-swe-agent==1.0 --hash=sha256:{right}\n")
    with pytest.raises(ClusterError, match="is no program"):  # installed, and there is none in it
        installation.install_harness_if_outdated("mini-swe-agent", tmp_path / "harnesses")


def write_wheel(folder: Path, name: str) -> str:
    """Write an empty package; the digest of its file."""
    folder.mkdir()
    path, facts = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", HARNESSES)
def test_the_lock_of_a_harness_pins_the_version_that_the_table_names(name: str) -> None:
    program = HARNESSES[name]
    if program.registry == "PyPI":
        pins = locked(f"harnesses/{name}/requirements")
        assert pins[normal(program.package)] == program.version
        assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins.values())
        return
    lock = json.loads((PACKAGE_LOCKS_DIR / name / "package-lock.json").read_text())
    assert lock["packages"][f"node_modules/{program.package}"]["version"] == program.version
    packages = [package for path, package in lock["packages"].items() if path]
    assert packages
    for package in packages:
        assert package["resolved"].startswith("https://registry.npmjs.org/")
        assert package["integrity"].startswith("sha512-")


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


TRACKER = "view/trackers/wandb_program.py"


def test_everything_imported_is_declared() -> None:
    imported: set[str] = set()
    for path, text in sources().items():
        if path.startswith("agents/gyms/workers/") or path == TRACKER:  # the next tests'
            continue
        for node in ast.walk(ast.parse(text)):
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
        "triton": ["torch"],  # which needs it beside CUDA
        "pydantic_core": ["pydantic"],  # a part of pydantic, which pins it exactly
    }
    allowed = declared("serve", "train", "agents", "camel", *FRAMEWORKS)
    for name in imported - sys.stdlib_module_names - {"areal_hpc"}:
        assert not allowed.isdisjoint(map(normal, origins.get(name, []))), name


@pytest.mark.parametrize(
    ("gym", "packages"),
    [
        ("gymnasium", {"gymnasium", "numpy"}),
        ("mcp", {"mcp", "httpx2"}),
        ("nemo-gym", {"nemo-gym", "httpx"}),
        ("openenv", {"openenv", "httpx", "uvicorn"}),
        ("verifiers", {"verifiers"}),
    ],
)
def test_a_gym_s_lock_has_what_its_worker_imports(gym: str, packages: set[str]) -> None:
    worker = sources()[f"agents/gyms/workers/{gym.replace('-', '_')}_worker.py"]
    imported = {
        name.partition(".")[0].replace("_", "-")
        for name in re.findall(r"^\s*(?:import|from) ([\w.]+)", worker, re.MULTILINE)
    }
    assert imported - sys.stdlib_module_names - {"worker-loop"} == packages
    assert packages <= locked(f"gyms/{gym}").keys()


def test_the_lock_of_a_tracker_has_what_its_program_imports() -> None:
    assert "import wandb" in sources()[TRACKER]
    assert "wandb" in locked("wandb")


def test_the_exact_pins_of_the_extras_are_those_of_the_locks() -> None:
    for role in ("serve", "train"):
        pins = [line.split("==") for line in PROJECT["optional-dependencies"][role] if "==" in line]
        assert pins
        assert {name: locked(role)[name] for name, _ in pins} == dict(pins)
