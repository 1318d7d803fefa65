"""Check of each role's Python: does it have the packages that the role imports?"""

from collections.abc import Iterator, Mapping

from areal_hpc.checkout import format_python_hint
from areal_hpc.errors import Problem
from areal_hpc.launch.role_python import (
    INTERPRETER_TIMEOUT_S,
    PythonDescription,
    RolePythonError,
    describe_pythons,
)
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
"""Modules that a role imports before it does anything."""


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
    """Problems of interpreters that exist: packages that they lack, CUDA that they cannot use."""
    for role, answer in describe_role_pythons(pythons).items():
        yield from judge_role_python(recipe, role, pythons[role], answer)


def judge_role_python(
    recipe: Recipe, role: str, python: str, answer: PythonDescription | RolePythonError
) -> Iterator[Problem]:
    key = f"cluster.{role}.python"
    command = format_python_hint(python, ENVIRONMENTS[role])
    hint = f"{command}, or set {key} to an environment that has it"
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
            f"set {key} to an environment with CUDA's torch, or trainer.device=cpu "
            "inference.device=cpu",
        )
