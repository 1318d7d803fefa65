"""`Sandbox`: runs commands, reads and writes files, enforces limits, until it is stopped."""

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
"""`none`: an empty loopback network; `session-only`: one loopback port, which a forwarder outside
serves; `open`: the network of the machine."""

SESSION_PORT = 8999
"""Port of 127.0.0.1 that leads from a sandbox with a `session-only` network to its session."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of a sandbox. It ends when it exceeds those on memory or processes."""

    memory_bytes: int = 2 << 30
    """Resident memory of all its processes together, and private memory of each of them."""
    processes: int = 256
    disk_bytes: int = 1 << 30
    """Total size of its files, which lie in the node's memory."""
    files: int = 100_000
    output_bytes: int = 1 << 20
    """Output of one command, for each of its two streams; a command that prints more is killed."""
    inotify_instances: int = 64
    """Inotify instances; the kernel also limits those of the user as a whole."""
    watch_period_s: float = 0.5
    """Time between two checks of the limits that the kernel does not enforce."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Description of a sandbox to start."""

    root: Path | None = None
    """Folder, tar or image of a root file system, never changed; None: the machine's own."""
    network: Network = "none"
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    writable_folders: tuple[str, ...] = ()
    """Paths of further folders that commands may write in, empty at first."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of commands, beside the variables of every sandbox."""
    readonly_folders: tuple[str, ...] = ()
    """Folders of this machine that it shows at the same paths, read-only."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Read-only files in `Sandbox.files_folder`, by name."""


START_TIMEOUT_S = 30.0
"""Time limit of a start, long enough for a loaded node."""
FILE_TIMEOUT_S = 120.0
"""Time limit to read or write files of a sandbox."""
KILL_ALL_TIMEOUT_S = 10.0
"""Time limit to kill all commands of a sandbox."""
MAX_FILE_BYTES = 64 << 20
"""Default size limit of a file that is read out of a sandbox."""
_MAX_COMPLAINT_CHARS = 500
_UMASK = 0o022
"""Umask of commands; that of a run, 077, would hide files from a task's tests."""


@dataclass(frozen=True, slots=True)
class SandboxStartPlan:
    """Process to start for a sandbox, as a runtime prepares it."""

    command: Sequence[str]
    """Command line; its standard input is the channel of the command server."""
    command_folder: str
    """Working directory of commands."""
    limits: SandboxLimits
    command_variables: Mapping[str, str]
    """Environment of commands."""
    pass_fds: Sequence[int] = ()
    user: int | None = None
    """User and group of the process; None: the caller's."""
    process_environ: Mapping[str, str] | None = None
    """Environment of the process itself; None: `PATH` alone."""
    on_stop: Callable[[], None] | None = None
    """Function that removes what the process leaves."""
    files_folder: str = "/sandbox"
    """Folder of `SandboxSpec.files` as commands see it."""


class Sandbox:
    """Sandbox that runs commands until it is stopped; commands see the files of earlier ones.

    When it has ended, commands and file operations raise `SandboxLostError`. A file operation that
    fails raises an `OSError` with the message of the command server.
    """

    def __init__(
        self, plan: SandboxStartPlan, process: subprocess.Popen[bytes], channel: CommandChannel
    ) -> None:
        self.folder = plan.command_folder
        """Working directory of commands; relative paths are below it."""
        self.files_folder = plan.files_folder
        """Folder of `SandboxSpec.files` as commands see it."""
        self.base_url = ""
        """URL of the model's endpoint for commands; empty if they cannot reach it."""
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
        """Start a sandbox, and return it after its server's first message.

        Raises:
            ClusterError: It did not start; the message has the process's error output.
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
                output = await sandbox._read_error_output()
            finally:  # the read may be cancelled
                await sandbox.stop()
            reason = (
                output
                or (f"no answer within {START_TIMEOUT_S:.0f} s", "it ended")[
                    isinstance(error, EOFError)
                ]
            )
            raise ClusterError(f"a sandbox did not start: {reason}") from error
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
        """Whether the sandbox runs."""
        return not self._channel.closed.is_set() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process on this machine that is the ancestor of all the sandbox's processes."""
        return self._process.pid

    async def open_model_endpoint(self, url: str) -> str:
        """Let commands reach this address (`http://HOST:PORT`), and return its URL in the sandbox.

        It is the only address that they reach in a `session-only` network.
        """
        if self._forwarder is None:
            return url
        address = urlsplit(url)
        await self._forwarder.start_forwarding_to(
            address.hostname or "127.0.0.1", address.port or 80
        )
        return f"http://127.0.0.1:{SESSION_PORT}"

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Add variables to the environment of all later commands."""
        self._variables |= variables

    def start_lifetime_limit(self, time_s: float) -> None:
        """End the sandbox after this time."""
        self._clock = asyncio.get_running_loop().call_later(
            time_s, self._end_as_lost, f"its time of {time_s:g} s is over"
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
        """Run a command to its end; a string is a command for the shell.

        The command is killed with its whole session when it takes too long or prints too much. Its
        background processes go on. `processor_s` limits the processor time of each of its
        processes. It inherits `descriptors` from number 3 on; they are closed here.
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
        """Write a file, and make its parent folders."""
        data = content.encode() if isinstance(content, str) else content
        await self._run_file_operation(
            {"operation": "put", "path": self._resolve_path(path), "mode": mode}, data
        )

    async def get(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Read a regular file."""
        request = {"operation": "get", "path": self._resolve_path(path), "max_bytes": max_bytes}
        return await self._run_file_operation(request, b"", max_bytes)

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it, if it exists."""
        await self._run_file_operation(
            {"operation": "remove", "path": self._resolve_path(path)}, b""
        )

    async def kill_all_commands(self) -> None:
        """Kill all commands and their background processes."""
        try:
            await self._channel.kill_all(KILL_ALL_TIMEOUT_S)
        except EOFError:
            await self._raise_as_lost("all of it was killed")

    async def pack(
        self, folder: str, max_bytes: int, patterns: Sequence[str] | None = None
    ) -> bytes:
        """Return a tar of a folder's files, folders and links, or of plain files by `patterns`."""
        path = self._resolve_path(folder)
        request = {"operation": "pack", "path": path, "patterns": patterns}
        return await self._run_file_operation(request, b"", max_bytes)

    async def unpack(self, archive: bytes, folder: str = "/") -> None:
        """Unpack a tar into a folder; a link to a folder stands for a folder of the tar."""
        request = {"operation": "unpack", "path": self._resolve_path(folder)}
        await self._run_file_operation(request, archive)

    async def stop(self) -> None:
        """End all processes, and remove all files. Repeated calls are harmless.

        Cancelling the caller does not interrupt it.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._end())
        await asyncio.shield(self._stopping)

    async def _end(self) -> None:
        for timer in (self._watch, self._clock):
            if timer is not None:
                timer.cancel()
        self._kill_process_tree()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._channel.close()
        # The wait runs in a thread, because the kernel takes time to tear down namespaces.
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
        result = await self._run(request, data, max_bytes, FILE_TIMEOUT_S)
        operation = f"{request['operation']} {request.get('path', '')}"
        if result.timed_out:
            raise TimeoutError(f"{operation}: not done within {FILE_TIMEOUT_S:g} s")
        if result.is_cut_off or result.exit_code != 0:
            message = result.stderr.decode(errors="replace").strip().removeprefix("sandbox: ")
            reason = f"it is longer than {max_bytes} bytes" if result.is_cut_off else message
            raise OSError(f"{operation}: {reason}")
        return result.stdout

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
            command = shlex.join(request.get("command", [request["operation"]]))[:200]
            await self._raise_as_lost(f"it ran: {command}")
        finally:
            self._running -= 1

    async def _raise_as_lost(self, what_happened: str) -> NoReturn:
        reason = self._why_lost or "one of its processes ended it"
        await self.stop()
        raise SandboxLostError(
            f"the sandbox is gone ({reason}) while {what_happened}", kind="SandboxLost"
        ) from None

    async def _kill_when_over_limits(self) -> None:
        """End the sandbox when it exceeds its limits, its own processes at the start not counted.

        No check is made while no command runs.
        """
        limits, own = self._plan.limits, list_descendants(self.pid)
        own_count, own_bytes = len(own), measure_memory_bytes(own, limits.memory_bytes)
        while True:
            await self._active.wait()
            processes = list_descendants(self.pid)
            used_bytes = measure_memory_bytes(processes, limits.memory_bytes)
            if used_bytes > limits.memory_bytes + own_bytes:
                self._end_as_lost(f"it used more than {limits.memory_bytes >> 20} MiB of memory")
            if len(processes) > limits.processes + own_count:
                self._end_as_lost(f"it had more than {limits.processes} processes")
            if self._running == 0 and len(processes) <= own_count:
                self._active.clear()
            await asyncio.sleep(limits.watch_period_s)

    def _end_as_lost(self, reason: str) -> None:
        self._why_lost = self._why_lost or reason
        self._kill_process_tree()

    def _kill_process_tree(self) -> None:
        if self._process.poll() is not None:  # another process may have its number now
            return
        descendants = list_descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in descendants:
            end_process(process)

    async def _read_error_output(self) -> str:
        stream = self._process.stderr
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        for _ in range(20):  # it may still write after its channel closes
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.05)
        output = stream.read() or b""
        return " ".join(output.decode(errors="replace").split())[-_MAX_COMPLAINT_CHARS:]


def _start_process(plan: SandboxStartPlan, channel: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process in the calling thread, whose end would end the process."""
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
