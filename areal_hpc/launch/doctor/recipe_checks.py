"""Checks of a recipe: interpreters, model, data sets, agent."""

from collections.abc import Iterator
from pathlib import Path

from areal_hpc.jobs.environment import get_interpreters
from areal_hpc.launch.doctor.checks import CheckResult, fail, ok
from areal_hpc.launch.doctor.python_checks import check_interpreters
from areal_hpc.launch.doctor.subject import DoctorSubject
from areal_hpc.launch.input_checks import load_user_code_and_find_input_problems


def check_role_interpreters(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    assert doctor_subject.recipe is not None
    if doctor_subject.slurm.container.kind == "none":
        yield from check_interpreters(get_interpreters(doctor_subject.recipe))


def check_recipe_inputs(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    assert doctor_subject.recipe is not None
    pythons = get_interpreters(doctor_subject.recipe)
    problems = [
        problem
        for problem in load_user_code_and_find_input_problems(
            doctor_subject.recipe, pythons, (str(Path.cwd()),)
        )
        if not problem.key.endswith(".python")
    ]
    for problem in problems:
        yield fail(problem.key or "recipe", problem.message, problem.hint)
    if not problems:
        yield ok("recipe", "model, data and agent found")
