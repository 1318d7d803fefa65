"""Registry of the checks of `areal-hpc doctor`; a failure in one does not stop the others."""

import logging
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

import areal_hpc
from areal_hpc.errors import ArealError
from areal_hpc.jobs.config import get_interpreters
from areal_hpc.launch.checks.inputs import find_input_problems
from areal_hpc.launch.checks.role_python import (
    PythonDescription,
    describe_role_pythons,
    judge_role_python,
)
from areal_hpc.launch.doctor.gpu import GpuCheckPlan, examine_gpu_node
from areal_hpc.launch.doctor.machine_checks import (
    check_program_isolation,
    check_shared_root,
    check_storage,
    list_security_means,
)
from areal_hpc.launch.doctor.results import CheckResult, DoctorSubject, fail, ok
from areal_hpc.launch.doctor.slurm_checks import (
    check_accounting,
    check_accounting_limits,
    check_container,
    check_partitions,
    check_qos_preemption,
    check_sbatch_accepts,
    check_slurm_answers,
)
from areal_hpc.launch.provenance import read_repository
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.files import write_atomic

log = logging.getLogger(__name__)


def check_role_interpreters(subject: DoctorSubject) -> Iterator[CheckResult]:
    assert subject.recipe is not None
    if subject.slurm.container.kind == "none":
        yield from check_interpreters(subject.recipe, get_interpreters(subject.recipe))


def check_interpreters(recipe: Recipe, pythons: Mapping[str, str]) -> Iterator[CheckResult]:
    answers = describe_role_pythons(pythons)
    for role, python in pythons.items():
        name, answer = f"python {role}", answers[role]
        problems = list(judge_role_python(recipe, role, python, answer))
        for problem in problems:
            yield fail(name, problem.message, problem.hint)
        if not problems and isinstance(answer, PythonDescription):
            versions = {"python": answer.version, **answer.packages}
            yield ok(name, ", ".join(f"{package} {text}" for package, text in versions.items()))


def check_recipe_inputs(subject: DoctorSubject) -> Iterator[CheckResult]:
    assert subject.recipe is not None
    pythons = get_interpreters(subject.recipe)
    problems = [
        problem
        for problem in find_input_problems(subject.recipe, pythons, (str(Path.cwd()),))
        if not problem.key.endswith(".python")
    ]
    for problem in problems:
        yield fail(problem.key or "recipe", problem.message, problem.hint)
    if not problems:
        yield ok("recipe", "model, data and agent found")


CheckPrerequisite = Literal["slurm", "recipe", "file root"]


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    name: str
    run: Callable[[DoctorSubject], Iterable[CheckResult]]
    needs: tuple[CheckPrerequisite, ...] = ()
    """Prerequisites: a slurmctld that answers, a recipe, a file root. Else the check is skipped."""


CHECKS = (
    DoctorCheck("slurm", check_slurm_answers),
    DoctorCheck("accounting", check_accounting, ("slurm",)),
    DoctorCheck("partitions", check_partitions, ("slurm",)),
    DoctorCheck("preemption by QOS", check_qos_preemption, ("slurm",)),
    DoctorCheck("limits", check_accounting_limits, ("slurm", "recipe")),
    DoctorCheck("jobs", check_sbatch_accepts, ("slurm",)),
    DoctorCheck("container", check_container, ("slurm",)),
    DoctorCheck("storage", check_storage, ("file root",)),
    DoctorCheck("shared", check_shared_root, ("file root",)),
    DoctorCheck("isolation", check_program_isolation),
    DoctorCheck("means of isolation", list_security_means),
    DoctorCheck("interpreters", check_role_interpreters, ("recipe",)),
    DoctorCheck("recipe", check_recipe_inputs, ("recipe",)),
)
"""All checks, in the order of their results. Add a new check here."""


def run_checks(
    subject: DoctorSubject,
    gpu_plan: GpuCheckPlan | None = None,
    checks: Sequence[DoctorCheck] = CHECKS,
) -> list[CheckResult]:
    """Run all checks whose prerequisites are met; a check that raises an error has failed."""
    results: list[CheckResult] = []
    if gpu_plan is not None:
        checks = (
            *checks,
            DoctorCheck("GPUs", lambda subject: examine_gpu_node(gpu_plan, subject.print_line)),
        )
    for check in checks:
        if all(_is_prerequisite_met(subject, fact) for fact in check.needs):
            results += _run_check(check, subject)
    return results


def _is_prerequisite_met(subject: DoctorSubject, fact: CheckPrerequisite) -> bool:
    match fact:
        case "slurm":
            return not subject.slurm_answer.outage
        case "recipe":
            return subject.recipe is not None
        case "file root":
            return subject.fileroot is not None


def _run_check(check: DoctorCheck, subject: DoctorSubject) -> Iterator[CheckResult]:
    try:
        yield from check.run(subject)
    except ArealError as error:
        for problem in error.problems:
            yield fail(check.name, problem.message, problem.hint)
    except Exception as error:  # boundary: one check's failure must not hide the others' results
        log.debug("check %s", check.name, exc_info=True)
        yield fail(
            check.name,
            f"the check itself failed: {type(error).__name__}: {error}",
            "the other checks stand; report this one with the output of this command",
        )


def write_evidence(path: Path, results: Sequence[CheckResult]) -> None:
    """Write the file of `doctor --json` for an issue or a script, without environment variables."""
    repository = read_repository(Path(__file__).parent)
    evidence: dict[str, Any] = {
        "areal_hpc": areal_hpc.__version__,
        "commit": repository.revision if repository else None,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "results": results,
    }
    encoded = msgspec.json.format(msgspec.json.encode(evidence, enc_hook=str), indent=2)
    write_atomic(path, encoded + b"\n")
