"""Check results: ok, warning or failure, and their listing."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    """A run may work, though not as well as it could, or it could not be found out."""
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
