"""Execution of one untrusted Python program to its end."""

from areal_hpc.sandbox.process import (
    Isolation,
    ProgramLimits,
    ProgramResult,
    SandboxedProcess,
    get_configured_isolation,
)


def run_empty_program_to_test_isolation() -> None:
    """Run an empty program, isolated as `reward.isolation` says."""
    run_program("")


def run_program(
    program_source: str,
    stdin: str = "",
    limits: ProgramLimits | None = None,
    isolation: Isolation | None = None,
) -> ProgramResult:
    """Run Python source in a sandbox of its own, with the standard library alone.

    Limited: time, memory, output, processes, what it writes. It sees the system's programs, an
    empty folder, itself, and no network; when it returns nothing of the program is left. By default
    it is isolated as `reward.isolation` says; without isolation it reads and writes what its user
    may, and what leaves its process group stays.
    """
    files = {"program.py": program_source.encode(errors="replace")}
    process = SandboxedProcess(
        files,
        limits or ProgramLimits(),
        isolation or get_configured_isolation(),
        stdin=stdin.encode(errors="replace"),
    )
    return process.communicate()
