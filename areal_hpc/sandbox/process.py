"""A process of one untrusted program: started in a sandbox, fed, watched and ended.

By default bubblewrap isolates it (`bubblewrap_command_line.py`). With `isolation="none"` it has
limits and a process group of its own and nothing more: it reads and writes what its user may.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from areal_hpc.errors import ClusterError, RecipeError, SandboxStartError
from areal_hpc.jobs.processes.descendants import list_descendants
from areal_hpc.recipe.sections.reward import ISOLATION_VARIABLE
from areal_hpc.sandbox.bubblewrap_command_line import (
    NOBODY_UID,
    PROGRAM_VARIABLES,
    SCRIPTS_DIR,
    USER_NAMESPACE_HINT,
    build_bwrap_command,
    find_sandbox_python,
    hold_content_descriptors,
    may_become_nobody,
    require_bubblewrap,
    tells_of_refusal,
)
from areal_hpc.sandbox.memory import measure_memory_bytes
from areal_hpc.sandbox.seccomp import build_seccomp_filter

Isolation = Literal["bwrap", "none"]
STARTUP_ALLOWANCE_S = 15.0
"""Time on top of the program's own for a loaded machine to start two interpreters."""
_POLL_INTERVAL_S = 0.05
_TRANSIENT_FAILURE_TEXTS = ("Resource temporarily unavailable", "Cannot allocate memory")
"""What bubblewrap says where the node has no process or memory left now (EAGAIN, ENOMEM)."""
_LAUNCHER_PATH = Path(__file__).with_name("launcher.py")


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Resource limits of a program."""

    time_s: float = 5.0
    """Of a processor; a program that sleeps is stopped `STARTUP_ALLOWANCE_S` later."""
    memory_bytes: int = 512 * 1024 * 1024
    """Address space of each of its processes, and resident memory of all together."""
    output_bytes: int = 1024 * 1024
    """Size of what it prints, and of each file it writes."""
    processes: int = 16
    scratch_bytes: int = 64 * 1024 * 1024
    """Size of each of the two folders in which it may write; isolated programs alone."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    exit_code: int
    """0 is success; 128 + n: ended by signal n."""
    stdout: str
    stderr: str
    timed_out: bool


def get_configured_isolation() -> Isolation:
    return "none" if os.environ.get(ISOLATION_VARIABLE) == "none" else "bwrap"


class SandboxedProcess:
    """A Python program that runs in a sandbox, with the standard library alone.

    Args:
        files: By name, what lies beside the program; it is the first of them.
        limits: What it may use.
        isolation: How it is kept apart.
        stdin: What it reads.
        channel_fd: Descriptor that it inherits, under the same number.
        keeps_output: Keep what it prints, up to `limits.output_bytes`.

    Raises:
        RecipeError: This machine cannot isolate it.
        ClusterError: It could not be started.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        limits: ProgramLimits,
        isolation: Isolation,
        *,
        stdin: bytes = b"",
        channel_fd: int | None = None,
        keeps_output: bool = True,
    ) -> None:
        self._limits, self._stdin, self._isolation = limits, memoryview(stdin), isolation
        self._collected: dict[IO[bytes], bytearray] = {}
        self._is_cut_off = self._is_over = self._has_begun = False
        output = subprocess.PIPE if keeps_output else subprocess.DEVNULL
        as_nobody = may_become_nobody()
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as inherited:
            self._report, writing = os.pipe()
            kept.callback(os.close, self._report)
            inherited.callback(os.close, writing)
            descriptors = [writing] + ([] if channel_fd is None else [channel_fd])
            folder = "/"
            if isolation == "bwrap":
                command = _build_isolated_command(files, limits, descriptors, inherited, as_nobody)
            else:
                folder = kept.enter_context(_make_program_work_folder(files))
                command = _build_unisolated_command(folder, files, limits, writing, as_nobody)
            try:
                self._process = subprocess.Popen(
                    [*command, *([] if channel_fd is None else [str(channel_fd)])],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=folder,
                    env=PROGRAM_VARIABLES | ({} if isolation == "bwrap" else {"HOME": folder}),
                    pass_fds=descriptors,
                    start_new_session=True,
                    user=NOBODY_UID if as_nobody else None,
                    group=NOBODY_UID if as_nobody else None,
                    extra_groups=[] if as_nobody else None,
                )
            except OSError as error:
                raise ClusterError(f"a sandboxed program could not be started: {error}") from error
            self._cleanup = kept.pop_all()
        self._deadline = time.monotonic() + limits.time_s + STARTUP_ALLOWANCE_S

    def communicate(self, watched_processes: Sequence["SandboxedProcess"] = ()) -> ProgramResult:
        """Feed it and wait for its end; processes beside it are watched meanwhile.

        It is killed at its time limit, when it prints too much, or when its processes hold too much
        memory. No process that it started is left, where it is isolated.
        """
        try:
            timed_out = self._exchange_bytes(watched_processes)
        finally:
            self.kill()
        out, err = (
            bytes(self._collected.get(stream, b"")).decode(errors="replace") if stream else ""
            for stream in (self._process.stdout, self._process.stderr)
        )
        self.require_begun(err or ("it took too long" if timed_out else ""))
        code = self._process.returncode
        return ProgramResult(
            code if code >= 0 else 128 - code,
            out,
            err,
            timed_out or code in (128 + signal.SIGXCPU, -signal.SIGXCPU),
        )

    def require_begun(self, printed_text: str = "") -> None:
        """Raise if the program never began, now that it has ended; `printed_text` is its output.

        Raises:
            RecipeError: This machine cannot isolate it.
            ClusterError: It did not start, for another reason.
        """
        if not self._has_begun:
            raise _explain_failed_start(self._isolation, printed_text)

    def kill(self) -> None:
        """End it now, with all that it started, and close what is open of it. May be repeated."""
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._has_begun = os.read(self._report, 1) == b"1"
        self._cleanup.close()

    def is_over_memory(self) -> bool:
        processes = (self._process.pid, *list_descendants(self._process.pid))
        limit = self._limits.memory_bytes
        return measure_memory_bytes(processes, limit) > limit

    def _exchange_bytes(self, other_processes: Sequence["SandboxedProcess"]) -> bool:
        process = self._process
        with selectors.DefaultSelector() as selector:
            for stream in filter(None, (process.stdout, process.stderr)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
                self._collected[stream] = bytearray()
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            looked_at = time.monotonic()
            while process.poll() is None:
                for key, _ in selector.select(_POLL_INTERVAL_S):
                    self._move_bytes(selector, key.fileobj)  # type: ignore[arg-type]
                if not selector.get_map():
                    time.sleep(_POLL_INTERVAL_S / 10)
                now = time.monotonic()
                if now > self._deadline:
                    return True
                if self._is_cut_off:
                    return False
                if now - looked_at > _POLL_INTERVAL_S:
                    looked_at = now
                    if any(one.is_over_memory() for one in (self, *other_processes)):
                        return False
            for stream in list(self._collected):
                self._collect_output(stream)
        return False

    def _move_bytes(self, selector: selectors.BaseSelector, stream: IO[bytes]) -> None:
        if stream is not self._process.stdin:
            if not self._collect_output(stream):
                selector.unregister(stream)
            return
        try:
            self._stdin = self._stdin[os.write(stream.fileno(), self._stdin[:65536]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not read, or has ended
            self._stdin = memoryview(b"")
        if not self._stdin:
            selector.unregister(stream)
            stream.close()

    def _collect_output(self, stream: IO[bytes]) -> bool:
        collected = self._collected[stream]
        while True:
            try:
                piece = os.read(stream.fileno(), 65536)
            except BlockingIOError:
                return True
            room = self._limits.output_bytes - len(collected)
            collected += piece[:room]
            if len(piece) > room:
                self._is_cut_off = True
                return False
            if not piece:
                return False


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


@contextlib.contextmanager
def _make_program_work_folder(files: Mapping[str, bytes]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as name:
        folder, own = Path(name), Path(name) / "own"
        own.mkdir()
        for one, content in {**files, _LAUNCHER_PATH.name: _LAUNCHER_PATH.read_bytes()}.items():
            (folder / one).write_bytes(content)
            (folder / one).chmod(0o644)
        for path, mode in ((folder, 0o755), (own, 0o777)):
            path.chmod(mode)  # a launcher that is root runs it as nobody
        yield str(own)


def _build_unisolated_command(
    work_folder: str, names: Iterable[str], limits: ProgramLimits, report_fd: int, as_nobody: bool
) -> list[str]:
    python, _ = _require_sandbox_python(as_nobody)
    # Here the kernel counts all processes of the user.
    request = asdict(limits) | {"report_fd": report_fd, "is_init": False}
    request["processes"] += _count_user_threads(NOBODY_UID if as_nobody else os.geteuid())
    launcher, *scripts = (
        str(Path(work_folder).parent / name) for name in (_LAUNCHER_PATH.name, *names)
    )
    return [python, "-I", "-S", launcher, json.dumps(request), python, *scripts]


def _build_isolated_command(
    files: Mapping[str, bytes],
    limits: ProgramLimits,
    descriptors: list[int],
    inherited_files: contextlib.ExitStack,
    as_nobody: bool,
) -> list[str]:
    opened = inherited_files.enter_context(hold_content_descriptors())
    bwrap = require_bubblewrap(build_isolation_error, by_anybody=as_nobody)
    python, prefix = _require_sandbox_python(as_nobody)
    request = json.dumps(asdict(limits) | {"report_fd": descriptors[0], "is_init": True})
    places = [f"{SCRIPTS_DIR}/{name}" for name in files]
    command = build_bwrap_command(
        str(bwrap),
        [python, "-I", "-S", f"{SCRIPTS_DIR}/{_LAUNCHER_PATH.name}", request, python, *places],
        opened,
        scripts={**files, _LAUNCHER_PATH.name: _LAUNCHER_PATH.read_bytes()},
        readonly_folders={} if prefix is None else {prefix: prefix},
        scratch_bytes=limits.scratch_bytes,
        program_filter=build_seccomp_filter(is_of_program=True),
    )
    descriptors += opened.descriptors
    return command


def _require_sandbox_python(as_nobody: bool) -> tuple[str, str | None]:
    found = find_sandbox_python(by_anybody=as_nobody)
    if found is None:
        raise ClusterError(
            f"user {NOBODY_UID} may run no python3 of this machine",
            hint="install the distribution's python3, or do not start the run as root",
        )
    return found


def _count_user_threads(user: int) -> int:
    def count() -> Iterator[int]:
        for process in psutil.process_iter(["uids", "num_threads"]):
            if process.info["uids"] and process.info["uids"].real == user:
                yield process.info["num_threads"] or 0

    return sum(count())


def _explain_failed_start(isolation: Isolation, printed_text: str) -> ClusterError | RecipeError:
    why = " ".join(printed_text.split())[-500:] or "it ended without a word"
    is_of_this_moment = any(sign in printed_text for sign in _TRANSIENT_FAILURE_TEXTS)
    if isolation == "bwrap" and tells_of_refusal(printed_text) and not is_of_this_moment:
        return build_isolation_error(why)
    kind = SandboxStartError if is_of_this_moment else ClusterError
    return kind(f"a sandboxed program did not start: {why}")


def build_isolation_error(reason: str, way_out: str = USER_NAMESPACE_HINT) -> RecipeError:
    """The error of a machine that cannot isolate what a model wrote, or whoever meets it."""
    return RecipeError(
        f"programs that the model wrote cannot be isolated on this machine: {reason}",
        key="reward.isolation",
        hint=f"{way_out}, or set reward.isolation=none: then such a program can do all that "
        "you can",
    )
