"""Checks of what isolates programs and commands that the model writes."""

from collections.abc import Iterator
from typing import Any

from areal_hpc.errors import ArealError
from areal_hpc.launch.doctor.checks import CheckResult, DoctorSubject, fail, ok, warn
from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox_starts
from areal_hpc.sandbox.program import check_programs_run
from areal_hpc.sandbox.runtimes import find_installed_runtimes


def check_program_isolation(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    yield from try_isolation(None)
    runtimes = [name for name in find_installed_runtimes() if name != "none"]
    yield ok("sandboxes", f"installed: {', '.join(runtimes) or 'none'}")


def try_isolation(agent: dict[str, Any] | None) -> Iterator[CheckResult]:
    """Start an empty program and, given a section `rollout.agent`, a sandbox as it asks for.

    A recipe that gives agents sandboxes needs them; only `code_reward` needs the other.
    """
    try:
        check_programs_run()
    except ArealError as error:
        problem = error.problems[0]
        finding = f"{problem.message} (only code_reward needs it)"
        yield warn("isolation", finding, problem.hint)
    else:
        yield ok("isolation", "programs of the model run in namespaces of their own here")
    if agent is None:
        return
    try:
        check_sandbox_starts(agent)
    except ArealError as error:
        yield fail("isolation", error.problems[0].message, error.problems[0].hint)
    else:
        yield ok("isolation", "a sandbox of the recipe's agents starts")
