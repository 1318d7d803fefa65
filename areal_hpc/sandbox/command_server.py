"""Program inside a sandbox that runs commands for its host: `command_server.py JSON`.

Stands alone, with the standard library only. The channel, standard input or one descriptor in its
place, is a socket of messages. The host sends `begin N`, `kill N` and `end N`, where N is a number
for the answer; `begin` brings descriptors: of the request, as JSON, and of what the command gets as
its standard streams and above. The server sends `ready` at first, and `N EXIT_CODE`. Each command
is a child; files are read and written by children too, so that none of them holds the server up.
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
"""Of a command for which there is no process."""
MAX_DESCRIPTORS = 8
MAX_PENDING_SIGNALS = 4096
"""And timers, of which the sandbox's user has a limited number elsewhere, too."""
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_FILTER_INSTRUCTION_BYTES = 8


class CommandServer:
    """Begins commands, and tells how they ended."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._numbers: dict[int, int] = {}
        """Of commands, by their processes."""
        channel = request["channel_fd"]
        self._channel = socket.socket(fileno=os.dup(channel))  # not inherited by commands
        self._channel.setblocking(True)  # a kernel may hand the channel over otherwise
        nothing = os.open("/dev/null", os.O_RDWR)
        for descriptor in {0, 1, channel}:
            os.dup2(nothing, descriptor)
        self._woken, waking = os.pipe()
        for one in (self._woken, waking):
            os.set_blocking(one, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the first process it ignores the others

    def announce_ready(self) -> None:
        """Say that the server is ready; with the socket that listens for the session, if asked."""
        port = self._request["session_port"]
        if port is None:
            self._channel.send(READY_MESSAGE)
            return
        with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
            socket.send_fds(self._channel, [READY_MESSAGE], [listener.fileno()])

    def serve(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # the host is gone
            while True:
                readable, _, _ = select.select([self._channel.fileno(), self._woken], [], [])
                if self._woken in readable:
                    os.read(self._woken, 4096)
                if self._channel.fileno() in readable:
                    self._handle_message()
                self._reap_commands()
        while below := list_children(os.getpid()):
            for pid in below:
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
            said = f"sandbox: no process could be started: {error}"
            os.write(descriptors[3], said.encode())
            self._send_exit_code(command_number, NOT_BEGUN_CODE)
        else:
            if pid == 0:
                become_command_process(descriptors)
            self._numbers[pid] = command_number
        for descriptor in descriptors:
            os.close(descriptor)

    def _kill_all_descendants(self, answer_number: int) -> None:
        while below := list_children(os.getpid()):
            for pid in below:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)  # children of those become this process's own
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
        for place, descriptor in enumerate(descriptors[1:]):
            os.dup2(descriptor, place)
        # Pipes of other commands, which wait for an end.
        os.closerange(len(descriptors) - 1, os.sysconf("SC_OPEN_MAX"))
        if is_program:
            exec_program(request)
        # Imported here alone: it costs more than the start of the server.
        sys.path.insert(0, __file__.rpartition("/")[0])
        importlib.import_module("sandbox_files").run_file_operation(request)
        code = 0
    except BaseException as error:  # boundary: whatever it is, the child ends here
        if is_program:
            code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"sandbox: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def exec_program(request: dict[str, Any]) -> None:
    if request["processor_s"] is not None:
        most = math.ceil(request["processor_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    os.chdir(request["folder"])
    name = request["command"][0]
    try:
        os.execvpe(name, request["command"], request["variables"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no program {name}") from error


def kill_session(leader: int) -> None:
    """Kill a command, and what it started, as far as that has not left its session."""
    with contextlib.suppress(OSError):
        os.kill(leader, signal.SIGKILL)  # it has no session yet in its first moment
    for process in os.scandir("/proc"):
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(process.name)) == leader:
                    os.kill(int(process.name), signal.SIGKILL)


def list_children(pid: int) -> list[int]:
    """Children of a process, orphans that it adopted among them."""
    try:
        listed = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY)
        with os.fdopen(listed, "rb") as file:
            return [int(one) for one in file.read().split()]
    except OSError:  # a kernel that does not tell; then the sandbox's end is theirs
        return []


def set_resource_limits(limits: dict[str, int]) -> None:
    """Limits of each process, and of the number of all of them where the kernel counts here."""
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    wanted = [
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
    ]
    if limits["counts_processes"] and kernel >= (5, 14):
        # Older ones count all processes of the user, in whatever namespace (ucounts, Linux 5.14).
        wanted.append((resource.RLIMIT_NPROC, limits["processes"]))
    for which, value in wanted:
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            value = min(value, ceiling)
        resource.setrlimit(which, (value, value))


def install_filter(libc: ctypes.CDLL, program: bytes) -> None:
    """Have the kernel refuse system calls to this process and all that it starts (seccomp(2))."""
    instructions = ctypes.create_string_buffer(program, len(program))
    count = len(program) // _FILTER_INSTRUCTION_BYTES
    packed = struct.pack("@HP", count, ctypes.addressof(instructions))  # struct sock_fprog
    described = ctypes.create_string_buffer(packed, len(packed))
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described), 0, 0),
    ):
        if libc.prctl(*map(ctypes.c_ulong, arguments)) != 0:
            raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def main() -> None:
    """Protect this process from those that it starts, and serve."""
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
