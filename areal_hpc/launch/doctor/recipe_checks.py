"""Checks of a recipe: interpreters, model, data sets, agent."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from areal_hpc.checkout import format_python_hint
from areal_hpc.jobs.environment import get_interpreters
from areal_hpc.launch.doctor.checks import CheckResult, DoctorSubject, fail, ok
from areal_hpc.launch.input_checks import find_input_problems
from areal_hpc.launch.role_python import PythonDescription, describe_role_pythons, judge_role_python
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import ENVIRONMENTS


def check_role_interpreters(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    assert doctor_subject.recipe is not None
    if doctor_subject.slurm.container.kind == "none":
        yield from check_interpreters(
            doctor_subject.recipe, get_interpreters(doctor_subject.recipe)
        )


def check_interpreters(recipe: Recipe, pythons: Mapping[str, str]) -> Iterator[CheckResult]:
    there = {role: python for role, python in pythons.items() if shutil.which(python)}
    answers = describe_role_pythons(there)
    for role, python in pythons.items():
        name, key = f"python {role}", f"cluster.{role}.python"
        if role not in there:
            hint = f"{format_python_hint(python, ENVIRONMENTS[role])}, or {key}=/path/to/python"
            yield fail(name, f"there is no interpreter at {python}", hint)
            continue
        answer = answers[role]
        problems = list(judge_role_python(recipe, role, python, answer))
        for problem in problems:
            yield fail(name, problem.message, problem.hint)
        if not problems and isinstance(answer, PythonDescription):
            versions = {"python": answer.version, **answer.packages}
            yield ok(name, ", ".join(f"{package} {one}" for package, one in versions.items()))


def check_recipe_inputs(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    assert doctor_subject.recipe is not None
    pythons = get_interpreters(doctor_subject.recipe)
    problems = [
        problem
        for problem in find_input_problems(doctor_subject.recipe, pythons, (str(Path.cwd()),))
        if not problem.key.endswith(".python")
    ]
    for problem in problems:
        yield fail(problem.key or "recipe", problem.message, problem.hint)
    if not problems:
        yield ok("recipe", "model, data and agent found")
