"""Sandboxed execution of untrusted Python programs.

Limited: time, memory, output, processes; no network and no view of other processes where the
kernel allows namespaces (`ProgramResult.is_apart` says so). Not limited: reading files that the
user may read. A cluster that wants more runs the agents' role in a container of its own.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError

STARTUP_ALLOWANCE_S = 5.0
"""Time on top of the program's own for a loaded machine to start two interpreters."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Resource limits of a program."""

    time_s: float = 5.0
    """Of a processor; a program that sleeps is stopped `STARTUP_ALLOWANCE_S` later."""
    memory_bytes: int = 512 * 1024 * 1024
    """Address space of each of its processes."""
    output_bytes: int = 1024 * 1024
    """Size of what it prints, and of each file it writes."""
    processes: int = 16
    """Processes and threads. Counted by user: other programs of the user take part of them."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Exit status and output of a program."""

    exit_code: int
    """0 is success; 128 + n: ended by signal n."""
    stdout: str
    stderr: str
    timed_out: bool
    is_apart: bool
    """It had no network and saw no other processes; False where the kernel has no namespaces."""


def run_program(source: str, stdin: str = "", limits: ProgramLimits | None = None) -> ProgramResult:
    """Run Python source in a process and a folder of its own, with the standard library alone.

    When it returns no process of the program is left, where namespaces are allowed; else none that
    stayed in its process group.

    Raises:
        ClusterError: It could not be started at all.
    """
    limits = limits or ProgramLimits()
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        folder, own = Path(name), Path(name) / "own"
        own.mkdir()
        program = folder / "program.py"
        program.write_text(source, encoding="utf-8", errors="replace")
        for path, mode in ((folder, 0o755), (own, 0o777), (program, 0o644)):
            path.chmod(mode)  # a launcher that is root runs it as nobody
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        return _run_child(folder, own, program, limits)


def _run_child(folder: Path, own: Path, program: Path, limits: ProgramLimits) -> ProgramResult:
    reading, writing = os.pipe()
    request = {**asdict(limits), "report_fd": writing}
    child = Path(__file__).with_name("child.py")
    out, err = folder / "stdout", folder / "stderr"
    with (
        (folder / "stdin").open("rb") as stdin,
        out.open("wb") as stdout,
        err.open("wb") as stderr,
    ):
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(child), json.dumps(request), str(program)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=own,
                env={"PATH": "/usr/bin:/bin", "HOME": str(own), "LC_ALL": "C.UTF-8"},
                pass_fds=(writing,),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        with process, os.fdopen(reading, "rb") as report:
            timed_out = _wait_and_kill(process, limits.time_s + STARTUP_ALLOWANCE_S)
            answer = report.read(1)
    if not answer and not timed_out:
        raise ClusterError(
            f"a sandbox did not start: {_read_text(err, limits.output_bytes)[-500:]}"
        )
    code = process.returncode
    return ProgramResult(
        code if code >= 0 else 128 - code,
        _read_text(out, limits.output_bytes),
        _read_text(err, limits.output_bytes),
        timed_out or code in (128 + signal.SIGXCPU, -signal.SIGXCPU, 128 + signal.SIGKILL),
        answer == b"1",
    )


def _wait_and_kill(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for a program, and end what is left of it. True if it took too long."""
    timed_out = False
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return timed_out


def _read_text(path: Path, most_bytes: int) -> str:
    with path.open("rb") as stream:
        return stream.read(most_bytes).decode(errors="replace")
