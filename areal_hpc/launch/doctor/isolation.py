"""Checks of what isolates programs and commands that the model writes."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from areal_hpc.errors import ArealError
from areal_hpc.launch.doctor.checks import CheckResult, DoctorSubject, ok, warn
from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox_starts
from areal_hpc.sandbox.program import check_programs_run
from areal_hpc.sandbox.runtimes import find_installed_runtimes
from areal_hpc.sandbox.seccomp import build_seccomp_filter

PROCESS_LIMIT_KERNEL = (5, 14)
"""From it on the kernel counts a sandbox's processes apart from those of its user."""
_NO_LIMIT_BYTES = 1 << 60
"""Control groups of version 1 write a number near 2**63 for none."""


def check_program_isolation(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    """Start an empty program and, if the recipe gives agents sandboxes, one of these."""
    try:
        check_programs_run()
    except ArealError as error:
        problem = error.problems[0]
        finding = f"{problem.message} (only code_reward needs it)"
        yield warn("isolation", finding, problem.hint)
    else:
        yield ok("isolation", "programs of the model run in namespaces of their own here")
    recipe = doctor_subject.recipe
    if recipe is None or not recipe.rollout.agent.isolation:
        return
    try:
        check_sandbox_starts(recipe.rollout.agent.model_dump(mode="json"))
    except ArealError as error:
        finding = f"{error.problems[0].message} (on nodes of the run it may)"
        yield warn("isolation", finding, error.problems[0].hint)
    else:
        yield ok("isolation", "a sandbox of the recipe's agents starts")


def list_security_means(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    runtimes = [name for name in find_installed_runtimes() if name != "none"]
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    given, missing = [f"sandboxes of {', '.join(runtimes) or 'nothing'}"], []
    for is_given, means, without in (
        (has_user_namespaces(Path("/proc")), "user namespaces", "no sandbox starts"),
        (
            has_seccomp(Path("/proc"), platform.machine()),
            "a filter of system calls",
            "semaphores, queues and namespaces are open to commands",
        ),
        (
            kernel >= PROCESS_LIMIT_KERNEL,
            "a number of processes for each sandbox",
            "processes are counted twice a second",
        ),
        (
            has_memory_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
            "a control group's limit of memory",
            "what a sandbox takes between two looks, twice a second, is not held",
        ),
    ):
        if is_given:
            given.append(means)
        else:
            missing.append(f"not here: {means}; {without}")
    yield ok("means of isolation", "\n".join(["; ".join(given), *missing]))


def has_user_namespaces(proc_dir: Path) -> bool:
    return int(_read_text(proc_dir / "sys/user/max_user_namespaces") or 0) > 0


def has_seccomp(proc_dir: Path, machine: str) -> bool:
    is_known = build_seccomp_filter(machine) is not None
    return is_known and "\nSeccomp:" in (proc_dir / "self/status").read_text()


def has_memory_limit(membership: Path, cgroup_dir: Path) -> bool:
    """True if a control group of this process, or one above it, limits memory.

    Args:
        membership: As `/proc/self/cgroup`, of version 1, 2 or both.
        cgroup_dir: Where control groups are mounted.
    """
    for line in membership.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            place = Path(name.lstrip("/"))
            for folder in (place, *place.parents):
                limit = _read_text(cgroup_dir / controllers / folder / file).strip()
                if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                    return True
    return False


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
