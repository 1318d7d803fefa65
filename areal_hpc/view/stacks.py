"""Stacks that processes of a run write on request, from their logs."""

import re
import time
from collections.abc import Sequence
from itertools import pairwise

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.files import write_atomic
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.logs import LogFile, choose_attempt, require_log_files

ANSWER_TIMEOUT_S = 15.0
_QUIET_S = 3.0
"""Time without a further answer after which the others are not waited for."""
_POLL_S = 0.2
_STACK_MARK = "(most recent call first):"
_IDLE_FRAME_PATTERN = re.compile(
    r'/(threading|queue|selectors|thread)\.py", line \d+ in (wait|get|select|_worker)$'
)
"""Innermost frame of a thread that waits for work."""


def fetch_stacks(paths: RunPaths, names: Sequence[str]) -> list[tuple[LogFile, list[str]]]:
    """Ask all processes for their stacks; return those in the logs of the named ones.

    Threads that wait for work come last. A process that does not answer is left out. No process is
    asked if no log has one of the names.
    """
    files = require_log_files(paths, choose_attempt(paths, None), names)
    sizes = {file.path: file.path.stat().st_size for file in files}
    for job_dir in paths.jobs_dir.iterdir():
        if job_dir.is_dir():
            write_atomic(paths.job(job_dir.name).stack_request, str(time.time_ns()).encode())
    began_at = changed_at = time.monotonic()
    answers: dict[LogFile, list[str]] = {}
    while time.monotonic() - began_at < ANSWER_TIMEOUT_S:
        time.sleep(_POLL_S)
        found = {file: lines for file in files if (lines := _read_stacks(file, sizes[file.path]))}
        if found != answers:
            answers, changed_at = found, time.monotonic()
        elif answers and time.monotonic() - changed_at > _QUIET_S:
            break
    if not answers:
        raise RecipeError(
            f"no process of {' '.join(names) or 'the run'} answered in {ANSWER_TIMEOUT_S:.0f} s",
            key=str(paths.root),
            hint="areal-hpc status says whether it runs; areal-hpc logs shows what it wrote last",
        )
    return list(answers.items())


def _read_stacks(file: LogFile, position: int) -> list[str]:
    with file.path.open("rb") as stream:
        stream.seek(position)
        lines = stream.read().decode(errors="replace").splitlines()
    begins = [number for number, line in enumerate(lines) if line.endswith(_STACK_MARK)]
    stacks = [lines[begin:end] for begin, end in pairwise([*begins, len(lines)])]
    stacks.sort(key=lambda stack: bool(_IDLE_FRAME_PATTERN.search("".join(stack[1:2]))))
    return [line for stack in stacks for line in stack]
