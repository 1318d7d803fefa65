"""Check of each role's Python: does it have the packages that the role imports?"""

import json
import subprocess
from collections.abc import Iterator, Mapping

from areal_hpc.checkout import format_python_hint
from areal_hpc.errors import Problem
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import ENVIRONMENTS
from areal_hpc.trainer.private_apis.megatron_replacing_packages import (
    MEGATRON_REPLACEMENTS,
    build_installed_replacement_problem,
)

MODULES_BY_ROLE = {
    "serve": ("sglang",),
    "train": ("torch", "megatron.core", "areal_hpc"),
    "agents": ("areal_hpc",),
}
REFUSED_MODULES_BY_ROLE: Mapping[str, tuple[str, ...]] = {"train": MEGATRON_REPLACEMENTS}
"""Modules that change what a role computes merely by being there."""
INTERPRETER_TIMEOUT_S = 60.0
"""A cold interpreter on busy shared storage takes that long, no more."""

# Modules are looked for, not imported: SGLang alone takes 4 to 11 s, and on a login node without
# GPU drivers its import may fail where it works on the nodes of the run.
_FIND_MODULES_SCRIPT = """
import importlib.metadata, importlib.util, json, sys
def find(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
found = [name for name in sys.argv[1:] if find(name)]
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = ""
print(json.dumps({"found": found, "torch": torch}))
"""


def find_role_python_problems(recipe: Recipe, pythons: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of interpreters that exist: packages that they lack, CUDA that they cannot use.

    All are asked at the same time.
    """
    asked = {
        role: subprocess.Popen(
            [
                python,
                "-c",
                _FIND_MODULES_SCRIPT,
                *MODULES_BY_ROLE[role],
                *REFUSED_MODULES_BY_ROLE.get(role, ()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, python in pythons.items()
    }
    for role, process in asked.items():
        key = f"cluster.{role}.python"
        command = format_python_hint(pythons[role], ENVIRONMENTS[role])
        hint = f"{command}, or set {key} to an environment that has it"
        try:
            shown, complaint = process.communicate(timeout=INTERPRETER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            message = f"{pythons[role]} did not start within {INTERPRETER_TIMEOUT_S:.0f} s"
            yield Problem(message, key, "put the environment on faster storage")
            continue
        if process.returncode:
            last = (complaint.strip().splitlines() or ["no output"])[-1]
            yield Problem(f"{pythons[role]} does not run: {last}", key, hint)
            continue
        found = json.loads(shown.splitlines()[-1])
        missing = [name for name in MODULES_BY_ROLE[role] if name not in found["found"]]
        for name in REFUSED_MODULES_BY_ROLE.get(role, ()):
            if name in found["found"]:
                yield build_installed_replacement_problem(name, pythons[role])
        if missing:
            lacks = f"the Python of role {role}, {pythons[role]}, lacks {', '.join(missing)}"
            yield Problem(lacks, key, hint)
        elif role == "train" and recipe.trainer.device == "cuda" and "+cpu" in found["torch"]:
            yield Problem(
                f"trainer.device=cuda, but {pythons[role]} has torch {found['torch']}, which "
                "computes on CPUs alone",
                key,
                f"set {key} to an environment with CUDA's torch, or trainer.device=cpu "
                "inference.device=cpu",
            )
