"""Differences between releases of Slurm, 22.05 to 26.05, and what is proven on which.

Everything else that this package asks of Slurm is the same in all of them. The words of states and
reasons are in `states.py` and `reasons.py`, each under the releases that have it. One difference
needs nothing of us: from 24.05 Slurm itself requeues a preempted job that ends at the warning
(`GRACE_PREEMPT` of its job_mgr.c), though its work may be done; it finds that out as it starts.
"""

import re
from datetime import datetime

PROVEN_RELEASES = ("22.05", "24.11", "26.05")
"""Releases that devclusters can be of, and the tests run on: those of Debian 12, Debian 13 and sid.

docs/devcluster.md has what was seen on each.
"""

UNPROVEN = "pyxis, enroot and memory limits of cgroup v2"
"""What needs a cluster that no test has."""

_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
_ERROR_LINE_PATTERN = re.compile(
    # To 24.11, and srun in all: `slurmstepd-n01: error: *** STEP 1.0 ON n01 CANCELLED AT ...`
    r"(?:slurmstepd|srun|slurmd)(?:-\w+)?: (?:error|\S+: error)"
    # slurmstepd from 25.05: `[2026-11-29T08:21:13.243] error: *** STEP 1.0 ON n01 CANCELLED ...`,
    # whose time has the default form of slurm.conf's LogTimeFormat.
    rf"|\[{_TIME}[^\]]*\] error: "
)
_ERROR_TIME_PATTERN = re.compile(rf" AT ({_TIME})|^\[({_TIME})")


def parse_release(version: str) -> str:
    found = re.search(r"\b\d\d\.\d\d(?=\.|\b)", version)
    return found[0] if found else ""


def describe_proof(version: str) -> str:
    """What is proven on a version that Slurm prints, and what is not."""
    release = parse_release(version)
    if release in PROVEN_RELEASES:
        return f"{release}: the tests run on it; on none of them ran {UNPROVEN}"
    tested = ", ".join(PROVEN_RELEASES)
    if PROVEN_RELEASES[0] < release < PROVEN_RELEASES[-1]:
        return f"{release}: not tested itself, but {tested} are; on none of them ran {UNPROVEN}"
    return f"outside of what is tested: {tested}"


def is_proven_or_between(version: str) -> bool:
    return PROVEN_RELEASES[0] <= parse_release(version) <= PROVEN_RELEASES[-1]


def parse_exit_status(text: str) -> tuple[int, int]:
    """Exit code and signal of a job, in squeue's column `exit_code`; zeros where there is none."""
    code, colon, signal = text.partition(":")
    if not code.isdigit():
        return 0, 0
    if colon:  # from 23.02: `1:0`
        return int(code), int(signal) if signal.isdigit() else 0
    return int(code) >> 8 & 0xFF, int(code) & 0x7F  # 22.05: the status of wait(2), `256`


def is_slurm_error_line(line: str) -> bool:
    return _ERROR_LINE_PATTERN.match(line) is not None


def find_error_time(line: str) -> float | None:
    found = _ERROR_TIME_PATTERN.search(line)
    return datetime.fromisoformat(found[1] or found[2]).timestamp() if found else None
