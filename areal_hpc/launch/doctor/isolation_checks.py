"""Check of the isolation of programs that the model writes."""

from collections.abc import Iterator

from areal_hpc.errors import ArealError
from areal_hpc.launch.doctor.checks import CheckResult, ok, warn
from areal_hpc.launch.doctor.subject import DoctorSubject
from areal_hpc.sandbox.run import check_isolation


def check_program_isolation(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    """An empty program in a sandbox, on this machine; only rewards that run programs need one."""
    try:
        check_isolation()
    except ArealError as error:
        problem = error.problems[0]
        yield warn("isolation", f"{problem.message} (only code_reward needs it)", problem.hint)
    else:
        yield ok("isolation", "programs of the model run in namespaces of their own here")
