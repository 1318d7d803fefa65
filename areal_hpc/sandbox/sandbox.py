"""A sandbox at work: commands and files in it, its limits, its end."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from areal_hpc.errors import ClusterError, SandboxLostError
from areal_hpc.jobs.processes.process_ties import (
    end_process,
    list_descendants,
)
from areal_hpc.sandbox.channel import CommandChannel, CommandResult
from areal_hpc.sandbox.memory import measure_memory_bytes
from areal_hpc.sandbox.session_forwarder import SessionForwarder

Network = Literal["none", "session-only", "open"]
"""`none`: loopback alone, with nothing on it; `session-only`: one address there, which a forwarder
outside serves; `open`: the network of the machine."""

SESSION_PORT = 8999
"""Port of 127.0.0.1 at which a sandbox with a `session-only` network finds its session."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a sandbox may use. One that uses more memory ends; of the rest it gets no more."""

    memory_bytes: int = 2 << 30
    """Resident memory of all its processes together, and private memory of each of them."""
    processes: int = 256
    disk_bytes: int = 1 << 30
    """All that it writes, in memory of the node."""
    files: int = 100_000
    output_bytes: int = 1 << 20
    """What one command prints, each of its two streams; a command that prints more is killed."""
    inotify_instances: int = 64
    """Of which its user has few elsewhere, too."""
    watch_period_s: float = 0.5
    """Time between two looks at what no limit of the kernel's counts."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """A sandbox to start."""

    root: Path | None = None
    """Folder, tar or image of a root file system, which stays as it is; None: the machine's own."""
    network: Network = "none"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    writable_folders: tuple[str, ...] = ()
    """Places of further folders that commands may write in, empty at first."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of commands, besides what every sandbox has."""
    readonly_folders: tuple[str, ...] = ()
    """Folders of this machine that it shows at their own places, read-only."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By name, files that it shows in `Sandbox.files_folder`, read-only."""


START_TIMEOUT_S = 30.0
"""A loaded node may take long to start a few processes."""
FILE_TIMEOUT_S = 120.0
"""To read or write files of a sandbox."""
KILL_ALL_TIMEOUT_S = 10.0
"""To kill what runs in a sandbox."""
MAX_FILE_BYTES = 64 << 20
"""A larger file is not read out of a sandbox, unless more is asked for."""
_MAX_COMPLAINT_CHARS = 500
_UMASK = 0o022
"""Of commands: that of a run, 077, would hide from a task's tests what they look for."""


@dataclass(frozen=True, slots=True)
class SandboxStartPlan:
    """How a runtime starts the process that a sandbox lives in."""

    command: Sequence[str]
    """Its standard input is the channel of the command server."""
    command_folder: str
    """Working directory of commands."""
    limits: SandboxLimits
    command_variables: Mapping[str, str]
    """Environment of commands."""
    pass_fds: Sequence[int] = ()
    user: int | None = None
    """The user to become, also the group."""
    process_environ: Mapping[str, str] | None = None
    """Of the process itself; None: hardly any."""
    on_stop: Callable[[], None] | None = None
    """Removes what the process leaves."""
    files_folder: str = "/sandbox"
    """Where commands find `SandboxSpec.files`."""


class Sandbox:
    """Commands run in it until it is stopped; they see what earlier ones left.

    Where it is gone, all that needs it raises `SandboxLostError`; what a file operation cannot do
    is an `OSError` with the sandbox's own words.
    """

    def __init__(
        self, plan: SandboxStartPlan, process: subprocess.Popen[bytes], channel: CommandChannel
    ) -> None:
        self.folder = plan.command_folder
        """Working directory of commands; relative paths are below it."""
        self.files_folder = plan.files_folder
        """Where `SandboxSpec.files` are."""
        self.base_url = ""
        """Where commands reach the model's endpoint; empty if they cannot."""
        self._plan, self._process, self._channel = plan, process, channel
        self._variables = dict(plan.command_variables)
        self._forwarder: SessionForwarder | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._why_lost = ""
        self._active = asyncio.Event()
        self._running = 0
        self._watch: asyncio.Task[None] | None = None
        self._stopping: asyncio.Future[None] | None = None

    @classmethod
    async def start(cls, plan: SandboxStartPlan) -> "Sandbox":
        """A sandbox whose server has answered.

        Raises:
            ClusterError: It did not; the message has what the process said.
        """
        channel = CommandChannel()
        try:
            process = _start_process(plan, channel.servers_end)
        except OSError as error:
            await channel.close()
            if plan.on_stop is not None:
                await asyncio.to_thread(plan.on_stop)
            raise ClusterError(f"a sandbox could not be started: {error}") from error
        channel.servers_end.close()
        sandbox = cls(plan, process, channel)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                listener = await channel.wait_for_hello()
        except (EOFError, TimeoutError, OSError) as error:
            try:
                said = await sandbox._read_error_output()
            finally:  # it may be cancelled meanwhile
                await sandbox.stop()
            why = (
                said
                or (f"no answer within {START_TIMEOUT_S:.0f} s", "it ended")[
                    isinstance(error, EOFError)
                ]
            )
            raise ClusterError(f"a sandbox did not start: {why}") from error
        except asyncio.CancelledError:
            await sandbox.stop()
            raise
        if listener is not None:
            listener.setblocking(False)
            sandbox._forwarder = SessionForwarder(listener)
        sandbox._watch = asyncio.create_task(sandbox._kill_when_over_limits())
        return sandbox

    @property
    def is_alive(self) -> bool:
        """True until it ends, for whatever reason."""
        return not self._channel.closed.is_set() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process of this machine below which all of the sandbox's are."""
        return self._process.pid

    async def open_model_endpoint(self, url: str) -> str:
        """Let commands reach this address (`http://HOST:PORT`); its URL within the sandbox.

        In a `session-only` network that is the only one that they reach.
        """
        if self._forwarder is None:
            return url
        address = urlsplit(url)
        await self._forwarder.start_forwarding_to(
            address.hostname or "127.0.0.1", address.port or 80
        )
        return f"http://127.0.0.1:{SESSION_PORT}"

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Give all later commands these variables as well."""
        self._variables |= variables

    def start_lifetime_limit(self, time_s: float) -> None:
        """End it after so long."""
        self._clock = asyncio.get_running_loop().call_later(
            time_s, self._end_as_lost, f"its {time_s:g} s are over"
        )

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | str = b"",
        timeout_s: float = 60.0,
        folder: str = "",
        variables: Mapping[str, str] | None = None,
        processor_s: float | None = None,
        descriptors: Sequence[int] = (),
    ) -> CommandResult:
        """Run a command to its end; text is one for the shell.

        It is killed with all of its session when it takes too long or prints too much. What it
        left in the background goes on. `processor_s` limits the processor time of each of its
        processes. `descriptors` are what it has from number 3 on; they are closed here.
        """
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        request = {
            "operation": "run",
            "command": words,
            "folder": self._resolve_path(folder),
            "variables": self._variables | dict(variables or {}),
            "processor_s": processor_s,
        }
        content = stdin.encode() if isinstance(stdin, str) else stdin
        return await self._run(
            request, content, self._plan.limits.output_bytes, timeout_s, descriptors
        )

    async def put(self, path: str, content: bytes | str, mode: int = 0o644) -> None:
        """Write a file, and make its folders."""
        data = content.encode() if isinstance(content, str) else content
        await self._run_file_operation(
            {"operation": "put", "path": self._resolve_path(path), "mode": mode}, data
        )

    async def get(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """The content of a regular file."""
        request = {"operation": "get", "path": self._resolve_path(path), "max_bytes": max_bytes}
        return await self._run_file_operation(request, b"", max_bytes)

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing if there is none."""
        await self._run_file_operation(
            {"operation": "remove", "path": self._resolve_path(path)}, b""
        )

    async def kill_all_commands(self) -> None:
        """Kill all that runs in it, also what commands left in the background."""
        try:
            await self._channel.kill_all(KILL_ALL_TIMEOUT_S)
        except EOFError:
            await self._raise_as_lost("all of it was killed")

    async def pack(self, folder: str, max_bytes: int) -> bytes:
        """What is in a folder, as a tar: files, folders and links."""
        request = {"operation": "pack", "path": self._resolve_path(folder)}
        return await self._run_file_operation(request, b"", max_bytes)

    async def unpack(self, archive: bytes, folder: str = "/") -> None:
        """Write the files of a tar into a folder; for a folder of its a link to one will do."""
        request = {"operation": "unpack", "path": self._resolve_path(folder)}
        await self._run_file_operation(request, archive)

    async def stop(self) -> None:
        """End all that runs in it; its files are gone. To be repeated without harm.

        Who is cancelled here does not hold it up.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._end())
        await asyncio.shield(self._stopping)

    async def _end(self) -> None:
        for one in (self._watch, self._clock):
            if one is not None:
                one.cancel()
        self._kill_process_tree()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._channel.close()
        # A thread: the kernel takes its time to tear namespaces down.
        await asyncio.to_thread(self._process.wait)
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._plan.on_stop is not None:
            await asyncio.to_thread(self._plan.on_stop)  # an agent may have written much

    def _resolve_path(self, path: str) -> str:
        return str(PurePosixPath(self.folder) / path)

    async def _run_file_operation(
        self, request: dict[str, Any], data: bytes, max_bytes: int = 1 << 16
    ) -> bytes:
        ended = await self._run(request, data, max_bytes, FILE_TIMEOUT_S)
        operation = f"{request['operation']} {request.get('path', '')}"
        if ended.timed_out:
            raise TimeoutError(f"{operation}: not done within {FILE_TIMEOUT_S:g} s")
        if ended.is_cut_off or ended.exit_code != 0:
            said = ended.stderr.decode(errors="replace").strip().removeprefix("sandbox: ")
            why = f"it is longer than {max_bytes} bytes" if ended.is_cut_off else said
            raise OSError(f"{operation}: {why}")
        return ended.stdout

    async def _run(
        self,
        request: dict[str, Any],
        data: bytes,
        max_bytes: int,
        timeout_s: float,
        descriptors: Sequence[int] = (),
    ) -> CommandResult:
        self._active.set()
        self._running += 1
        try:
            return await self._channel.run(request, data, max_bytes, timeout_s, descriptors)
        except EOFError:
            shown = shlex.join(request.get("command", [request["operation"]]))[:200]
            await self._raise_as_lost(f"it ran: {shown}")
        finally:
            self._running -= 1

    async def _raise_as_lost(self, what_happened: str) -> NoReturn:
        why = self._why_lost or "what ran in it ended it"
        await self.stop()
        raise SandboxLostError(
            f"the sandbox is gone ({why}) while {what_happened}", kind="SandboxLost"
        ) from None

    async def _kill_when_over_limits(self) -> None:
        """End the sandbox when it uses too much, beside what it took when nothing had run in it.

        It rests while nothing runs.
        """
        limits, own = self._plan.limits, list_descendants(self.pid)
        at_rest, own_bytes = len(own), measure_memory_bytes(own, limits.memory_bytes)
        while True:
            await self._active.wait()
            processes = list_descendants(self.pid)
            held = measure_memory_bytes(processes, limits.memory_bytes)
            if held > limits.memory_bytes + own_bytes:
                self._end_as_lost(f"it used more than {limits.memory_bytes >> 20} MiB of memory")
            if len(processes) > limits.processes + at_rest:
                self._end_as_lost(f"it had more than {limits.processes} processes")
            if self._running == 0 and len(processes) <= at_rest:
                self._active.clear()
            await asyncio.sleep(limits.watch_period_s)

    def _end_as_lost(self, reason: str) -> None:
        self._why_lost = self._why_lost or reason
        self._kill_process_tree()

    def _kill_process_tree(self) -> None:
        if self._process.poll() is not None:  # its number may be another's
            return
        below = list_descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for one in below:
            end_process(one)

    async def _read_error_output(self) -> str:
        stream = self._process.stderr
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        for _ in range(20):  # it may not have said all when its channel closes
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.05)
        said = stream.read() or b""
        return " ".join(said.decode(errors="replace").split())[-_MAX_COMPLAINT_CHARS:]


def _start_process(plan: SandboxStartPlan, channel: socket.socket) -> subprocess.Popen[bytes]:
    """In the calling thread, which must live on: the process ends with it."""
    return subprocess.Popen(
        list(plan.command),
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env=dict(plan.process_environ or {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}),
        pass_fds=tuple(plan.pass_fds),
        start_new_session=True,
        umask=_UMASK,
        user=plan.user,
        group=plan.user,
        extra_groups=None if plan.user is None else list[int](),
    )
