"""Extras of the package: each resolves for every Python that the package is for."""

import re
import tomllib
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT, find_uv, normalize_name

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
]
LOCK = tomllib.loads((CHECKOUT / "uv.lock").read_text())
PACKAGES: dict[tuple[str, str], dict[str, Any]] = {
    (one["name"], one["version"]): one for one in LOCK["package"] if "version" in one
}


def resolve(extra: str, python: str) -> dict[str, str]:
    """Package -> version of an extra for a Python on Linux, from uv.lock alone."""
    exported = said_by(
        run_program(
            *(find_uv(), "export", "--frozen", "--offline", "--quiet", "--no-hashes"),
            *("--no-annotate", "--no-header", "--no-emit-project", "--extra", extra),
        )
    )
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, str] = {}
    for line in exported.splitlines():
        pin, _, marker = line.partition(" ; ")
        if not marker or Marker(marker).evaluate({**environment, "extra": ""}):
            name, version = pin.split("==")
            assert found.setdefault(name, version) == version, f"{name} twice"
    return found


def list_tags(python: str) -> set[Tag]:
    version = tuple(map(int, python.split(".")))
    return {
        *cpython_tags(version, platforms=PLATFORMS),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", PLATFORMS),
    }


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_resolves_and_has_a_file_for_each_python(extra: str, python: str) -> None:
    """That the lock fits pyproject.toml is tested in tests/contract; here nothing is downloaded."""
    resolved = resolve(extra, python)
    for wanted in map(Requirement, [*PROJECT["dependencies"], *EXTRAS[extra]]):
        version = resolved[normalize_name(wanted.name)]
        assert wanted.specifier.contains(version, prereleases=True), wanted
    tags = list_tags(python)
    missing = []
    for name, version in resolved.items():
        package = PACKAGES[name, version]
        wheels = [one["url"].rpartition("/")[2] for one in package.get("wheels", ())]
        fits = any(parse_wheel_filename(wheel.replace("%2B", "+"))[3] & tags for wheel in wheels)
        if not fits and "sdist" not in package:
            missing.append(f"{name} {version}")
    assert missing == []


def test_the_lock_is_for_every_python_that_the_package_names() -> None:
    assert LOCK["requires-python"].replace(" ", "") in (">=3.11,<3.14", ">=3.11,<3.14.dev0")
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
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
