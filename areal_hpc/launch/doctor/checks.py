"""Check results: ok, warning or failure, and their listing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """A run may work, though not as well as it could, or it could not be found out."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    finding: str
    hint: str = ""
    """What to try; empty if all is well."""


def ok(name: str, finding: str) -> Check:
    """All is well."""
    return Check(name, Verdict.OK, finding)


def warn(name: str, finding: str, hint: str) -> Check:
    """Worth knowing."""
    return Check(name, Verdict.WARN, finding, hint)


def fail(name: str, finding: str, hint: str) -> Check:
    """A run would not work."""
    return Check(name, Verdict.FAIL, finding, hint)


def describe_checks(checks: Sequence[Check]) -> list[str]:
    """A line for each check, and one more for each that is not well; then the sum."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        first, *more = check.finding.splitlines() or [""]
        lines.append(f"{check.verdict:<4}  {check.name:<{width}}  {first}".rstrip())
        lines += [f"{'':<{width + 8}}{line}" for line in more]
        if check.hint:
            lines.append(f"{'':<{width + 8}}try: {check.hint}")
    counts = [sum(check.verdict is verdict for check in checks) for verdict in Verdict]
    lines.append(f"{counts[0]} ok, {counts[1]} to know of, {counts[2]} failed")
    return lines
