"""Results of the checks of `areal-hpc doctor`, and the subject of these checks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.launch.slurm_launcher import build_remaining_job_requests
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.slurm.batch_script import JobRequest
from areal_hpc.slurm.commands import has_slurm, run_slurm_command


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Possible problem: a run may work, but worse than it could, or the check found out nothing."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    verdict: CheckStatus
    finding: str
    hint: str = ""


def ok(check_name: str, finding: str) -> CheckResult:
    return CheckResult(check_name, CheckStatus.OK, finding)


def warn(check_name: str, finding: str, hint: str) -> CheckResult:
    return CheckResult(check_name, CheckStatus.WARN, finding, hint)


def fail(check_name: str, finding: str, hint: str) -> CheckResult:
    return CheckResult(check_name, CheckStatus.FAIL, finding, hint)


def format_checks(checks: Sequence[CheckResult]) -> list[str]:
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        first, *more = check.finding.splitlines() or [""]
        lines.append(f"{check.verdict:<4}  {check.name:<{width}}  {first}".rstrip())
        lines += [f"{'':<{width + 8}}{line}" for line in more]
        if check.hint:
            lines.append(f"{'':<{width + 8}}try: {check.hint}")
    counts = [sum(check.verdict is verdict for check in checks) for verdict in CheckStatus]
    lines.append(f"{counts[0]} ok, {counts[1]} warnings, {counts[2]} failed")
    return lines


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    settings: Mapping[str, str] = field(default_factory=dict)
    outage: str = ""
    """Reason why Slurm did not answer; empty if it did."""


@dataclass(frozen=True)
class DoctorSubject:
    recipe: Recipe | None = None
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    fileroot: Path | None = None
    has_site: bool = False
    """Whether a site file was given: its user means to submit."""
    may_submit_storage_job: bool = False
    print_line: Callable[[str], None] = print

    def resolve_fileroot(self) -> Path:
        assert self.fileroot is not None
        return self.fileroot.expanduser().resolve()

    @property
    def involves_slurm(self) -> bool:
        return self.has_site or self.slurm != SlurmConfig()

    @cached_property
    def slurm_answer(self) -> SlurmAnswer:
        if not has_slurm():
            return SlurmAnswer(outage="Slurm's commands are not installed on this machine")
        try:
            shown = run_slurm_command("scontrol", "show", "config")
        except ClusterError as error:
            # Without a cluster Slurm prints each step of its search; the last line has the result.
            return SlurmAnswer(outage=error.problems[0].message.splitlines()[-1])
        pairs = (line.partition("=") for line in shown.splitlines() if " = " in line)
        return SlurmAnswer({name.strip(): value.strip() for name, _, value in pairs})

    @cached_property
    def job_requests(self) -> list[JobRequest]:
        return (
            build_remaining_job_requests(self.recipe, Path.cwd()) if self.recipe is not None else []
        )
