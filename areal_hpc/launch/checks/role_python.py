"""Python of a role: its packages, problems of these, and answers of programs that it runs."""

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
"""A cold interpreter on busy shared storage takes that long, no more."""
PACKAGES = (
    "areal-hpc", "torch", "sglang", "megatron-core", "transformers", "flash-attn",
    "transformer-engine", "numpy", "openai",
)  # fmt: skip
"""Distributions that decide what is computed."""

MODULES_BY_ROLE = {
    "serve": ("sglang",),
    "train": ("torch", "megatron.core", "areal_hpc"),
    "agents": ("areal_hpc",),
}
"""Modules that a role imports before it does anything."""

# Modules are looked for, not imported: SGLang alone takes 4 to 11 s, and on a login node without
# GPU drivers its import may fail where it works on the nodes of the run. CUDA's version stands in
# torch's version.py.
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
    """A Python gave no answer. The message is its last line of output."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class PythonDescription:
    version: str
    packages: Mapping[str, str]
    """Versions of those of `PACKAGES` that it has."""
    cuda: str | None
    """Version that torch was built for; None for CPUs, or without torch."""
    modules: Mapping[str, str]
    """Files of the modules that were asked for, as far as it has them."""


def ask_role(
    python: str,
    *program: str,
    request: object = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = INTERPRETER_TIMEOUT_S,
) -> Any:
    """Run a program (`-c SCRIPT`, `-m MODULE`) in a role's Python; the JSON that it prints last.

    `request` goes to its standard input as JSON.
    """
    try:
        answer = subprocess.run(
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
    if answer.returncode:
        raise RolePythonError((answer.stderr.strip().splitlines() or ["no output"])[-1])
    try:
        return json.loads(answer.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise RolePythonError("it printed no answer") from error


def describe_python(python: str, modules: Sequence[str] = ()) -> PythonDescription:
    request = {"packages": PACKAGES, "modules": modules}
    return PythonDescription(**ask_role(python, "-c", _DESCRIBE_SCRIPT, request=request))


def describe_pythons(
    pythons: Iterable[str], modules: Sequence[str] = ()
) -> dict[str, PythonDescription | RolePythonError]:
    """Describe each Python, all at the same time; an error for one that gives no answer."""

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
    answers = describe_pythons(pythons.values(), modules)
    return {role: answers[python] for role, python in pythons.items()}


def find_role_python_problems(recipe: Recipe, pythons: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of interpreters: missing ones, packages that they lack, CUDA they cannot use."""
    for role, answer in describe_role_pythons(pythons).items():
        yield from judge_role_python(recipe, role, pythons[role], answer)


def judge_role_python(
    recipe: Recipe, role: str, python: str, answer: PythonDescription | RolePythonError
) -> Iterator[Problem]:
    key = f"cluster.{role}.python"
    command = format_python_hint(python, ENVIRONMENTS[role])
    hint = f"{command}, or set {key} to an environment that has it"
    if shutil.which(python) is None:
        yield Problem(f"no Python interpreter for role {role} at {python}", key, hint)
        return
    if isinstance(answer, RolePythonError):
        if answer.is_late:
            message = f"{python} did not start within {INTERPRETER_TIMEOUT_S:.0f} s"
            yield Problem(message, key, "put the environment on faster storage")
        else:
            yield Problem(f"{python} does not run: {answer}", key, hint)
        return
    for name in MEGATRON_REPLACEMENTS if role == "train" else ():
        if name in answer.modules:
            yield build_installed_replacement_problem(name, python)
    torch = answer.packages.get("torch", "")
    if missing := [name for name in MODULES_BY_ROLE[role] if name not in answer.modules]:
        lacks = f"the Python of role {role}, {python}, lacks {', '.join(missing)}"
        yield Problem(lacks, key, hint)
    elif role == "train" and recipe.trainer.device == "cuda" and "+cpu" in torch:
        yield Problem(
            f"trainer.device=cuda, but {python} has torch {torch}, which computes on CPUs alone",
            key,
            f"set {key} to an environment with CUDA's torch, or trainer.device=cpu",
        )
