"""Program inside a sandbox that runs commands for its host: `command_server.py JSON`.

It imports the standard library alone. The channel, standard input or another given descriptor, is
a socket of messages. The host sends `begin N`, `kill N` and `end N`, where N is the number of the
answer. `begin` carries descriptors: the request, as JSON, and the command's descriptors from
standard input on. The server sends `ready` at first, and `N EXIT_CODE` for each answer. Each
command and each file operation runs in a child, so that none of them delays the server.
"""

import contextlib
import ctypes
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

READY_MESSAGE = b"ready"
MAX_MESSAGE_BYTES = 64
NOT_BEGUN_CODE = -1
"""Exit code in the answer if no process could be started."""
MAX_DESCRIPTORS = 8
MAX_PENDING_SIGNALS = 4096
"""Limit of pending signals and timers; the kernel also limits those of the user as a whole."""
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_FILTER_INSTRUCTION_BYTES = 8


class CommandServer:
    """Server that starts commands, and sends their exit codes to the host."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._numbers: dict[int, int] = {}
        """Numbers of running commands, by the ids of their processes."""
        channel = request["channel_fd"]
        self._channel = socket.socket(fileno=os.dup(channel))  # not inherited by commands
        self._channel.setblocking(True)  # it may be inherited as non-blocking
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in {0, 1, channel}:
            os.dup2(null, descriptor)
        self._wakeup_read, wakeup_write = os.pipe()
        for descriptor in (self._wakeup_read, wakeup_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ignores others by default

    def announce_ready(self) -> None:
        """Send `ready`, with the listening socket of a `session-only` network if there is one."""
        port = self._request["session_port"]
        if port is None:
            self._channel.send(READY_MESSAGE)
            return
        with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
            socket.send_fds(self._channel, [READY_MESSAGE], [listener.fileno()])

    def serve(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # the host has closed the channel
            while True:
                readable, _, _ = select.select([self._channel.fileno(), self._wakeup_read], [], [])
                if self._wakeup_read in readable:
                    os.read(self._wakeup_read, 4096)
                if self._channel.fileno() in readable:
                    self._handle_message()
                self._reap_commands()
        while children := list_children(os.getpid()):
            for pid in children:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _handle_message(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(
            self._channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS
        )
        if not message:
            raise EOFError
        operation, number = message.decode().split()
        if operation == "begin":
            self._begin_command(int(number), descriptors)
        elif operation == "end":
            self._kill_all_descendants(int(number))
        else:
            for pid, running in self._numbers.items():
                if running == int(number):
                    kill_session(pid)

    def _begin_command(self, command_number: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            message = f"sandbox: no process could be started: {error}"
            os.write(descriptors[3], message.encode())
            self._send_exit_code(command_number, NOT_BEGUN_CODE)
        else:
            if pid == 0:
                become_command_process(descriptors)
            self._numbers[pid] = command_number
        for descriptor in descriptors:
            os.close(descriptor)

    def _kill_all_descendants(self, answer_number: int) -> None:
        while children := list_children(os.getpid()):
            for pid in children:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)  # their children become children of this process
            self._reap_commands()
        self._send_exit_code(answer_number, 0)

    def _reap_commands(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if (number := self._numbers.pop(pid, None)) is not None:
                    code = os.waitstatus_to_exitcode(status)
                    self._send_exit_code(number, code if code >= 0 else 128 - code)

    def _send_exit_code(self, number: int, exit_code: int) -> None:
        self._channel.send(b"%d %d" % (number, exit_code))


def become_command_process(descriptors: list[int]) -> NoReturn:
    is_program, code = True, 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        with os.fdopen(descriptors[0], "rb") as file:
            request = json.load(file)
        is_program = request["operation"] == "run"
        for target, descriptor in enumerate(descriptors[1:]):
            os.dup2(descriptor, target)
        # These are pipes of other commands, whose readers wait until all writers close them.
        os.closerange(len(descriptors) - 1, os.sysconf("SC_OPEN_MAX"))
        if is_program:
            exec_program(request)
        # Imported only here, because the import takes longer than the start of the server.
        sys.path.insert(0, __file__.rpartition("/")[0])
        importlib.import_module("sandbox_files").run_file_operation(request)
        code = 0
    except BaseException as error:  # boundary: the child prints any error, and ends
        if is_program:
            code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"sandbox: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def exec_program(request: dict[str, Any]) -> None:
    if request["processor_s"] is not None:
        limit_s = math.ceil(request["processor_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
    os.chdir(request["folder"])
    name = request["command"][0]
    try:
        os.execvpe(name, request["command"], request["variables"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no program {name}") from error


def kill_session(leader: int) -> None:
    """Kill a command, and the processes that it started and that are still in its session."""
    with contextlib.suppress(OSError):
        os.kill(leader, signal.SIGKILL)  # it has no session before its `setsid`
    for process in os.scandir("/proc"):
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(process.name)) == leader:
                    os.kill(int(process.name), signal.SIGKILL)


def list_children(pid: int) -> list[int]:
    """List the children of a process, with the orphans that it adopted."""
    try:
        descriptor = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # a kernel without this file; the children then end with the sandbox
        return []


def set_resource_limits(limits: dict[str, int]) -> None:
    """Limit each process, and their number if the kernel counts it by user namespace."""
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    limit_values = [
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
    ]
    if limits["counts_processes"] and kernel >= (5, 14):
        # Older kernels count the user's processes in all namespaces (ucounts came in Linux 5.14).
        limit_values.append((resource.RLIMIT_NPROC, limits["processes"]))
    for limit, value in limit_values:
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:
            value = min(value, ceiling)
        resource.setrlimit(limit, (value, value))


def install_filter(libc: ctypes.CDLL, program: bytes) -> None:
    """Install a seccomp(2) filter for this process and all its later descendants."""
    instructions = ctypes.create_string_buffer(program, len(program))
    count = len(program) // _FILTER_INSTRUCTION_BYTES
    packed = struct.pack("@HP", count, ctypes.addressof(instructions))  # struct sock_fprog
    fprog = ctypes.create_string_buffer(packed, len(packed))
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(fprog), 0, 0),
    ):
        if libc.prctl(*map(ctypes.c_ulong, arguments)) != 0:
            raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def main() -> None:
    """Protect this process from its descendants, and serve."""
    request = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if request["filter"] is not None:
        install_filter(libc, bytes.fromhex(request["filter"]))
    if request["limits"] is not None:
        set_resource_limits(request["limits"])
    os.umask(0o022)
    server = CommandServer(request)
    server.announce_ready()
    server.serve()


if __name__ == "__main__":
    main()
