"""Checks of each role's Python: interpreter and packages."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from areal_hpc.checkout import format_python_hint
from areal_hpc.launch.doctor.checks import CheckResult, fail, ok
from areal_hpc.rundir.paths import ENVIRONMENTS

REQUIRED_PACKAGES_BY_ROLE = {
    "serve": ("sglang",),
    "train": ("areal-hpc", "torch", "megatron-core"),
    "agents": ("areal-hpc", "openai"),
}
INTERPRETER_TIMEOUT_S = 60.0
"""A cold interpreter on busy shared storage takes that long, no more."""

_VERSIONS_SCRIPT = """
import importlib.metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = ""
print(json.dumps(found))
"""


def check_interpreters(pythons: Mapping[str, str]) -> Iterator[CheckResult]:
    for role, python in pythons.items():
        yield _check_interpreter(role, python)


def _check_interpreter(role: str, python: str) -> CheckResult:
    name, key = f"python {role}", f"cluster.{role}.python"
    if shutil.which(python) is None:
        hint = f"{format_python_hint(python, ENVIRONMENTS[role])}, or {key}=/path/to/python"
        return fail(name, f"there is no interpreter at {python}", hint)
    try:
        asked = subprocess.run(
            [python, "-c", _VERSIONS_SCRIPT, *REQUIRED_PACKAGES_BY_ROLE[role]],
            capture_output=True,
            text=True,
            timeout=INTERPRETER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        hint = "put the environment on faster storage"
        return fail(name, f"{python} did not start within {INTERPRETER_TIMEOUT_S:.0f} s", hint)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no output"])[-1]
        hint = f"fix it, or set {key} to another interpreter"
        return fail(name, f"{python} does not start: {last}", hint)
    found = json.loads(asked.stdout)
    missing = [package for package in REQUIRED_PACKAGES_BY_ROLE[role] if not found[package]]
    if missing:
        hint = f"install them there, or set {key} to another interpreter"
        return fail(name, f"{python} lacks {', '.join(missing)}", hint)
    return ok(name, ", ".join(f"{package} {version}" for package, version in found.items()))
