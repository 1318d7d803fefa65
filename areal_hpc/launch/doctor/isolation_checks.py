"""Check of the isolation of programs that the model writes."""

from collections.abc import Iterator

from areal_hpc.launch.doctor.checks import CheckResult
from areal_hpc.launch.doctor.gpu.node_isolation import judge_isolation, try_isolation
from areal_hpc.launch.doctor.subject import DoctorSubject


def check_program_isolation(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    """An empty program in a sandbox, on this machine; only rewards that run programs need one."""
    yield from map(judge_isolation, try_isolation(None))
