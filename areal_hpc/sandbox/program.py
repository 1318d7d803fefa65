"""Execution of Python programs that a model wrote, each in a sandbox with limits.

By default bubblewrap isolates the program. With `isolation="none"` only the limits apply: the
program reads and writes what its user may; a run by root starts it as user 65534.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from areal_hpc.errors import ClusterError, RecipeError, SandboxLostError, SandboxStartError
from areal_hpc.jobs.processes.line_workers import SHORTAGE_HINT
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from areal_hpc.sandbox.bwrap import USER_NAMESPACE_HINT, BwrapRuntime
from areal_hpc.sandbox.guest import require_python
from areal_hpc.sandbox.runtimes import HostRuntime, Runtime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxLimits, SandboxSpec

Isolation = Literal["bwrap", "none"]
STARTUP_ALLOWANCE_S = 15.0
"""Time that a loaded machine may take to start an interpreter, on top of the program's own."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ProgramLimits(SandboxLimits):
    """Limits of one program, and so of its sandbox."""

    time_s: float = 5.0
    """Processor time; a program that sleeps is killed `STARTUP_ALLOWANCE_S` later."""
    memory_bytes: int = 512 << 20
    processes: int = 16
    disk_bytes: int = 64 << 20
    inotify_instances: int = 0
    watch_period_s: float = 0.05


@dataclass(frozen=True, slots=True)
class ProgramResult:
    exit_code: int
    """0 after success; 128 + n after signal n."""
    stdout: str
    stderr: str
    timed_out: bool


def get_configured_isolation() -> Isolation:
    return "none" if os.environ.get(ISOLATION_VARIABLE) == "none" else "bwrap"


def run_program(
    program_source: str,
    stdin: str = "",
    limits: ProgramLimits | None = None,
    isolation: Isolation | None = None,
) -> ProgramResult:
    """Run Python source in a sandbox of its own, with the standard library alone.

    Time, memory, output, processes and disk space are limited. The program sees the system's
    programs, an empty folder and its own source, but no network. All its processes end with it. The
    default isolation is that of `reward.isolation`; without isolation the program reads and writes
    what its user may, and processes that left its process group go on.

    Raises:
        RecipeError: This machine cannot isolate the program.
        ClusterError: The program could not be started.
    """
    limits_used = limits or ProgramLimits()
    files = {"program.py": program_source.encode(errors="replace")}

    async def run() -> ProgramResult:
        async with start_program_sandbox(files, limits_used, isolation) as sandbox:
            return await run_python(sandbox, [*files], limits_used, stdin=stdin)

    return run_in_own_loop(run())


def check_programs_run() -> None:
    """Run an empty program.

    Raises:
        RecipeError: This machine cannot isolate programs.
        ClusterError: The program failed.
    """
    outcome = run_program("")
    if outcome.exit_code != 0:
        raise ClusterError(f"a sandboxed program did not run: {outcome.stderr.strip()[-500:]}")


@contextlib.asynccontextmanager
async def start_program_sandbox(
    files: Mapping[str, bytes], limits: ProgramLimits, isolation: Isolation | None = None
) -> AsyncIterator[Sandbox]:
    """Hold a sandbox with files for one program; the default isolation is `reward.isolation`."""
    runtime: Runtime = BwrapRuntime(build_isolation_error)
    if (isolation or get_configured_isolation()) == "none":
        runtime = HostRuntime(as_nobody=True)
    _, python_folder = require_python()
    spec = SandboxSpec(
        limits=limits,
        readonly_folders=() if python_folder is None else (python_folder,),
        files=files,
    )
    sandbox = await runtime.start(spec)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def run_python(
    sandbox: Sandbox,
    names: Sequence[str],
    limits: ProgramLimits,
    *,
    stdin: str = "",
    channel_fd: int | None = None,
    keeps_output: bool = True,
) -> ProgramResult:
    """Run the first of a sandbox's files, with the paths of the others as its arguments.

    With `channel_fd`, which is closed here, the program inherits that descriptor, and its last
    argument is the descriptor's number in the sandbox.
    """
    python, _ = require_python()
    words = [python, "-I", *(f"{sandbox.files_folder}/{name}" for name in names)]
    if channel_fd is not None:
        words.append("3")
    if not keeps_output:
        words = ["/bin/sh", "-c", 'exec "$@" > /dev/null 2>&1', "sh", *words]
    try:
        ended = await sandbox.exec(
            words,
            stdin=stdin.encode(errors="replace"),
            timeout_s=limits.time_s + STARTUP_ALLOWANCE_S,
            processor_s=limits.time_s,
            descriptors=[] if channel_fd is None else [channel_fd],
        )
    except SandboxLostError as error:  # it exceeded a limit, or killed the sandbox's processes
        return ProgramResult(128 + signal.SIGKILL, "", str(error), timed_out=False)
    if not ended.has_begun:
        raise SandboxStartError(f"a program did not start: {ended.text}", hint=SHORTAGE_HINT)
    return ProgramResult(
        ended.exit_code,
        ended.stdout.decode(errors="replace"),
        ended.stderr.decode(errors="replace"),
        ended.timed_out or ended.exit_code == 128 + signal.SIGXCPU,
    )


def run_in_own_loop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end, also from a thread in which an event loop runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def build_isolation_error(reason: str, way_out: str = USER_NAMESPACE_HINT) -> RecipeError:
    """Build the error for a machine that cannot isolate programs of a model."""
    return RecipeError(
        f"programs that the model wrote cannot be isolated on this machine: {reason}",
        key="reward.isolation",
        hint=f"{way_out}, or set reward.isolation=none: then such a program can do all that "
        "you can",
    )
