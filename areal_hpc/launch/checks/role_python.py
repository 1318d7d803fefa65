"""Python of a role: its packages, their problems, and programs that run in it."""

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from areal_hpc.checkout import format_python_hint
from areal_hpc.errors import Problem
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import ENVIRONMENTS
from areal_hpc.trainer.private_apis.megatron_replacing_packages import (
    MEGATRON_REPLACEMENTS,
    build_installed_replacement_problem,
)

INTERPRETER_TIMEOUT_S = 60.0
"""Maximum time of a program in a cold interpreter on busy shared storage."""
PACKAGES = (
    "areal-hpc", "torch", "sglang", "megatron-core", "transformers", "flash-attn",
    "transformer-engine", "numpy", "openai",
)  # fmt: skip
"""Distributions on which numerical results depend."""

MODULES_BY_ROLE = {
    "serve": ("sglang",),
    "train": ("torch", "megatron.core", "areal_hpc"),
    "agents": ("areal_hpc",),
}
"""Modules that a role imports before it does anything."""

# The script finds modules without importing them: SGLang alone takes 4 to 11 s, and its import may
# fail on a login node without GPU drivers though it works on the run's nodes. CUDA's version stands
# in torch's version.py.
_DESCRIBE_SCRIPT = r"""
import importlib.metadata, importlib.util, json, pathlib, platform, re, sys
packages, request = {}, json.load(sys.stdin)
for name in request["packages"]:
    try:
        packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
def find(name):
    try:
        return importlib.util.find_spec(name)
    except ImportError:
        return None
found = {name: spec.origin or "" for name in request["modules"] if (spec := find(name))}
cuda, torch = None, find("torch")
if torch is not None and torch.origin:
    text = pathlib.Path(torch.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", text, re.M)
    cuda = match and match[1]
print(json.dumps({"version": platform.python_version(), "packages": packages, "cuda": cuda,
                  "modules": found}))
"""


class RolePythonError(Exception):
    """Failure of a program in a role's Python; the message is its last line of output."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class PythonDescription:
    version: str
    packages: Mapping[str, str]
    """Versions of the installed `PACKAGES`."""
    cuda: str | None
    """CUDA version that torch was built for; None if for CPUs, or without torch."""
    modules: Mapping[str, str]
    """Files of the requested modules; missing modules are left out."""


def ask_role(
    python: str,
    *program: str,
    request: object = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = INTERPRETER_TIMEOUT_S,
) -> Any:
    """Run a program (`-c SCRIPT`, `-m MODULE`) in a role's Python; return its last line, as JSON.

    `request` goes to its standard input as JSON.
    """
    try:
        completed = subprocess.run(
            [python, *program],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environ,
        )
    except subprocess.TimeoutExpired as error:
        raise RolePythonError(f"no answer within {timeout_s:.0f} s", is_late=True) from error
    except OSError as error:
        raise RolePythonError(f"it does not start: {error.strerror}") from error
    if completed.returncode:
        raise RolePythonError((completed.stderr.strip().splitlines() or ["no output"])[-1])
    try:
        return json.loads(completed.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RolePythonError("it printed no answer") from error


def describe_python(python: str, modules: Sequence[str] = ()) -> PythonDescription:
    request = {"packages": PACKAGES, "modules": modules}
    return PythonDescription(**ask_role(python, "-c", _DESCRIBE_SCRIPT, request=request))


def describe_pythons(
    pythons: Iterable[str], modules: Sequence[str] = ()
) -> dict[str, PythonDescription | RolePythonError]:
    """Describe each Python, all at the same time; an error for one that fails."""

    def describe(python: str) -> PythonDescription | RolePythonError:
        try:
            return describe_python(python, modules)
        except RolePythonError as error:
            return error

    distinct = [*dict.fromkeys(pythons)]
    with ThreadPoolExecutor(max(1, len(distinct))) as pool:
        return dict(zip(distinct, pool.map(describe, distinct), strict=True))


def describe_role_pythons(
    pythons: Mapping[str, str],
) -> dict[str, PythonDescription | RolePythonError]:
    modules = (
        *{name for names in MODULES_BY_ROLE.values() for name in names},
        *MEGATRON_REPLACEMENTS,
    )
    descriptions = describe_pythons(pythons.values(), modules)
    return {role: descriptions[python] for role, python in pythons.items()}


def find_role_python_problems(recipe: Recipe, pythons: Mapping[str, str]) -> Iterator[Problem]:
    """Find problems of interpreters: missing ones, missing packages, CUDA they cannot use."""
    for role, description in describe_role_pythons(pythons).items():
        yield from judge_role_python(recipe, role, pythons[role], description)


def judge_role_python(
    recipe: Recipe, role: str, python: str, description: PythonDescription | RolePythonError
) -> Iterator[Problem]:
    key = f"cluster.{role}.python"
    command = format_python_hint(python, ENVIRONMENTS[role])
    hint = f"{command}, or set {key} to an environment that has it"
    if shutil.which(python) is None:
        hint = f"{command}, or set {key} to the interpreter of the role"
        yield Problem(f"no Python interpreter for role {role} at {python}", key, hint)
        return
    if isinstance(description, RolePythonError):
        if description.is_late:
            message = f"{python} did not start within {INTERPRETER_TIMEOUT_S:.0f} s"
            yield Problem(message, key, "put the environment on faster storage")
        else:
            yield Problem(f"{python} does not run: {description}", key, hint)
        return
    for name in MEGATRON_REPLACEMENTS if role == "train" else ():
        if name in description.modules:
            yield build_installed_replacement_problem(name, python)
    torch = description.packages.get("torch", "")
    if missing := [name for name in MODULES_BY_ROLE[role] if name not in description.modules]:
        message = f"the Python of role {role}, {python}, lacks {', '.join(missing)}"
        yield Problem(message, key, hint)
    elif role == "train" and recipe.trainer.device == "cuda" and "+cpu" in torch:
        yield Problem(
            f"trainer.device=cuda, but {python} has torch {torch}, which computes on CPUs alone",
            key,
            f"set {key} to an environment with CUDA's torch, or trainer.device=cpu",
        )
