"""scripts/setup.sh makes the environments of uv.lock once, and its errors name the next step.

The last environment is made for real, from uv's cache. Failures use a stand-in, a shell script in
the place of uv that writes down what it was asked.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.commands import only_programs, run_program, write_program
from tests.support.environments import CHECKOUT, export_lock, find_uv, normalize_name, sources
from tests.support.waiting import wait_for

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
STAND_IN = r"""
echo "$*" >>"$ASKED"
case "$*" in
  "venv "*)
    for last; do :; done
    mkdir -p "$last/bin"
    printf '#!/bin/sh\n' >"$last/bin/python"
    chmod +x "$last/bin/python" ;;
  *export*) echo "numpy==2.0.0" ;;
  "pip install "*require-hashes*)
    sleep "${INSTALLING_TAKES_S:-0}"
    [ ! -e "$INSTALLING_FAILS" ] || { echo "no such wheel" >&2; exit 1; } ;;
esac
"""


class Tree:
    """Checkout with the scripts and the lock, and a stand-in for uv on the PATH."""

    def __init__(self, root: Path) -> None:
        self.root = root / "checkout"
        self.asked = root / "asked"
        self.installing_fails = root / "installing-fails"
        self.uv = root / "bin" / "uv"
        self.uv.parent.mkdir()
        write_program(self.uv, STAND_IN)
        shutil.copytree(CHECKOUT / "scripts", self.root / "scripts")
        for name in ("pyproject.toml", "uv.lock", "README.md", "LICENSE"):
            shutil.copy(CHECKOUT / name, self.root)
        (self.root / "areal_hpc").symlink_to(CHECKOUT / "areal_hpc")

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        environ = {
            **os.environ,
            "PATH": f"{self.uv.parent}:{os.environ['PATH']}",
            "ASKED": str(self.asked),
            "INSTALLING_FAILS": str(self.installing_fails),
            **variables,
        }
        return subprocess.Popen(
            [self.root / "scripts" / "setup.sh", *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def set_up(self, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(*arguments, **variables)
        output, _ = process.communicate()
        return process.returncode, output

    def get_refusal(self, *arguments: str, **variables: str) -> str:
        """Return the output of a set-up that needs a person."""
        code, output = self.set_up(*arguments, **variables)
        assert code == 78, output
        return output

    def list_made(self) -> list[str]:
        return re.findall(r"^venv .*/\.venvs/(\w+)$", self.asked.read_text(), re.MULTILINE)

    def count_installations(self) -> int:
        return self.asked.read_text().count("--require-hashes")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_an_environment_holds_the_packages_of_the_lock(tree: Tree) -> None:
    real = {"PATH": f"{Path(find_uv()).parent}:{os.environ['PATH']}"}
    code, output = tree.set_up("camel", **real)
    assert code == 0, output
    assert re.search(r"^set-up: camel ready in \d+ s$", output, re.MULTILINE)
    python = tree.root / ".venvs/camel/bin/python"
    program = "import areal_hpc, importlib.metadata as m; print(m.version('camel-ai'))"
    version = subprocess.run([python, "-c", program], stdout=subprocess.PIPE, text=True)
    assert version.stdout.strip() == export_lock("--extra", "camel")["camel-ai"]
    assert tree.set_up("camel", **real) == (0, "")

    lock = tree.root / "uv.lock"
    of_package = re.compile(r'(?<=name = "astor"\n).*?(?=\n\[\[package)', re.DOTALL)
    lock.write_text(of_package.sub(forge_hashes, lock.read_text()))
    shutil.rmtree(tree.root / ".venvs/camel")
    assert "mismatch" in tree.get_refusal("camel", **real).lower()


def forge_hashes(package: re.Match[str]) -> str:
    return re.sub("sha256:[0-9a-f]{64}", f"sha256:{'0' * 64}", package[0])


def test_a_second_set_up_does_nothing(tree: Tree) -> None:
    code, output = tree.set_up()
    assert code == 0, output
    assert tree.list_made() == ["serve", "main"]
    calls = tree.asked.read_text()
    assert tree.set_up("all") == (0, "")
    assert tree.asked.read_text() == calls
    assert tree.set_up("tests")[0] == 0
    assert tree.list_made() == ["serve", "main", "camel"]


def test_environments_with_cuda_are_made_on_request_and_stay(tree: Tree) -> None:
    tree.set_up()
    assert "--group cuda" not in tree.asked.read_text()
    code, output = tree.set_up("gpu")
    assert code == 0, output
    assert tree.list_made() == ["serve", "main", "serve", "main"]
    assert tree.asked.read_text().count("--group cuda") == 2
    assert tree.set_up("gpu") == tree.set_up("all") == (0, "")


def test_a_changed_lock_changes_an_environment_in_place(tree: Tree) -> None:
    tree.set_up("main")
    (tree.root / "uv.lock").write_text("changed")
    tree.set_up("main")
    assert tree.list_made() == ["main"]
    assert tree.count_installations() == 2


def test_the_environments_of_a_moved_checkout_are_made_anew(tree: Tree) -> None:
    tree.set_up("main")
    tree.root = tree.root.rename(tree.root.with_name("moved"))
    tree.set_up("main")
    assert tree.list_made() == ["main", "main"]


def test_a_failed_set_up_says_why_and_the_next_one_goes_on(tree: Tree) -> None:
    tree.installing_fails.touch()
    output = tree.get_refusal("main")
    assert "no such wheel" in output
    assert "the main environment is not complete" in output
    tree.installing_fails.unlink()
    assert tree.set_up("main")[0] == 0


def test_two_set_ups_at_once_install_once(tree: Tree) -> None:
    both = [tree.start("main", INSTALLING_TAKES_S="0.5") for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert tree.count_installations() == 1


def test_an_interrupted_set_up_is_repeated(tree: Tree) -> None:
    process = tree.start("main", INSTALLING_TAKES_S="600")
    wait_for(lambda: tree.asked.exists() and tree.count_installations() == 1)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate()  # the pipe closes when every process that has it open has ended
    assert process.returncode != 0
    assert tree.set_up("main")[0] == 0
    assert tree.count_installations() == 2


def test_a_missing_uv_is_fetched_by_pip_or_asked_for(tree: Tree, tmp_path: Path) -> None:
    tree.uv.unlink()
    programs = "bash cat cc cut df dirname env flock getconf grep head mkdir sort tail uname"
    path = only_programs(tmp_path / "bin", *programs.split())
    output = tree.get_refusal(PATH=path, AREAL_HPC_PYTHON="/nowhere/python3.11")
    assert "/nowhere/python3.11" in output
    assert "install uv" in output
    fetching = write_program(tmp_path / "python", 'echo "$*" >>"$ASKED"; exit 1')
    tree.get_refusal(PATH=path, AREAL_HPC_PYTHON=str(fetching))
    assert "--require-hashes" in tree.asked.read_text()


def test_trainer_and_servers_have_one_torch_and_one_nccl() -> None:
    """NCCL refuses a peer of another version, and update groups join processes of both."""
    serve = export_lock("--extra", "serve", "--group", "serve-cuda", "--group", "cuda")
    main = export_lock("--extra", "main", "--group", "cuda")
    for package in ("torch", "nvidia-nccl-cu13", "triton"):
        assert serve[package] == main[package]
    on_cpu = export_lock("--extra", "main", "--group", "cpu")
    assert [name for name, version in on_cpu.items() if main[name] != version] == ["torch"]


def test_every_package_of_a_lock_has_hashes() -> None:
    pin = r"[\w.-]+==[\w.+]+( \\\n    --hash=sha256:[0-9a-f]{64})+"
    locks = [
        path
        for folder in ("requirements", "tests/locks")
        for path in (CHECKOUT / folder).rglob("*.txt")
    ]
    for lock in locks:
        text = re.sub(r"^#.*\n", "", lock.read_text(), flags=re.MULTILINE)
        packages = re.split(r"\n(?=\S)", text.strip())
        assert [package for package in packages if not re.fullmatch(pin, package)] == [], lock


TRACKER = "view/wandb_program.py"


def test_everything_imported_is_declared() -> None:
    imported: set[str] = set()
    for path, text in sources().items():
        if path.startswith("agents/gym_workers/") or path == TRACKER:  # the next test covers these
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    origins = {
        **importlib.metadata.packages_distributions(),
        "sglang": ["sglang"],  # not in the environment of the tests
        "xgrammar": ["sglang"],  # nor is this, which sglang pins
        "camel": ["camel-ai"],  # nor this
        "langchain_core": ["langchain"],  # which is made of it
        "triton": ["torch"],  # which needs it beside CUDA
        "pydantic_core": ["pydantic"],  # a part of pydantic, which pins it exactly
    }
    extras = PROJECT["optional-dependencies"].values()
    requirements = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    declared = {normalize_name(re.split(r"[<>=\[]", line)[0]) for line in requirements}
    # worker_loop lies beside the program of a worker.
    for name in imported - sys.stdlib_module_names - {"areal_hpc", "worker_loop", "literals"}:
        assert not declared.isdisjoint(map(normalize_name, origins.get(name, []))), name


SUCCEEDS_AFTER_AN_UPDATE = """
echo "$*" >>"$ASKED"
[ "$1" != update ] || exit 0
grep -q update "$ASKED"
"""
FAILS = 'echo "$*" >>"$ASKED"; echo "no such package"; exit 1'


def install_browser(folder: Path, apt_get: str) -> tuple[CompletedProcess[str], list[str]]:
    """Return the ended script, run as root, and the calls of apt-get."""
    write_program(folder / "apt-get", apt_get)
    write_program(folder / "id", "echo 0")
    calls = folder / "asked"
    path = only_programs(folder, "bash", "dirname", "env", "grep", "mktemp", "rm", "sed", "tail")
    environ = {"PATH": path, "ASKED": str(calls), "TMPDIR": str(folder)}
    ended = run_program(CHECKOUT / "scripts" / "install_browser.sh", environ=environ)
    return ended, calls.read_text().splitlines()


def test_a_package_that_is_not_found_is_asked_for_again_after_an_update(tmp_path: Path) -> None:
    ended, calls = install_browser(tmp_path, SUCCEEDS_AFTER_AN_UPDATE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line.split()[0] for line in calls] == ["install", "update", "install"]
    assert calls[-1].endswith(" chromium")
    assert list(tmp_path.glob("tmp.*")) == []


def test_what_apt_get_said_is_told_and_kept_when_it_fails(tmp_path: Path) -> None:
    ended, calls = install_browser(tmp_path, FAILS)
    assert (ended.returncode, len(calls)) == (78, 2)
    (log,) = tmp_path.glob("tmp.*")
    assert "    no such package\n" in ended.stderr
    assert f"browser: apt-get failed; its whole output is in {log}\n  try: " in ended.stderr
