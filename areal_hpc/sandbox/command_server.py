"""Program inside a sandbox that runs commands for its host: `command_server.py JSON`.

Stands alone, with the standard library only. Standard input and output, or one descriptor in their
place, are the channel, of frames: the number of a command, a letter, the size of what follows. Each
command is a child with pipes of its own; files are read and written by children too, so that none
of them holds the server up.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

FRAME_HEADER_STRUCT = struct.Struct("!IcI")
BEGIN_FRAME, INPUT_FRAME, KILL_FRAME = b"x", b"i", b"k"
"""To the server. `INPUT_FRAME` without content ends a command's input."""
HELLO_FRAME, STDOUT_FRAME, STDERR_FRAME, INPUT_TAKEN_FRAME, EXIT_CODE_FRAME = (
    b"h",
    b"o",
    b"e",
    b"a",
    b"r",
)
"""From the server. `INPUT_TAKEN_FRAME` says how many bytes of input a command has read."""
CHUNK_BYTES = 1 << 16
MAX_PENDING_SIGNALS = 4096
"""And timers, of which the sandbox's user has a limited number elsewhere, too."""
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_FILTER_INSTRUCTION_BYTES = 8


class Command:
    """A child, and what is left of its pipes."""

    def __init__(self, pid: int, stdin: int, streams: dict[int, bytes]) -> None:
        self.pid, self.stdin, self.streams = pid, stdin, streams
        self.backlog: deque[bytes] = deque()
        self.is_input_over = False


class CommandServer:
    """Begins commands, moves what they read and write, tells how they ended."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._commands: dict[int, Command] = {}
        self._selector = selectors.DefaultSelector()
        self._received = bytearray()
        self._reading, self._writing = os.dup(0), os.dup(1)  # not inherited by commands
        nothing = os.open("/dev/null", os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        self._selector.register(self._reading, selectors.EVENT_READ, self._handle_received_messages)
        woken, waking = os.pipe()
        for one in (woken, waking):
            os.set_blocking(one, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the first process it ignores the others
        self._selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 4096))

    def announce_ready(self) -> None:
        """Say that the server is ready; with the socket that listens for the session, if asked."""
        port = self._request["session_port"]
        frame = FRAME_HEADER_STRUCT.pack(0, HELLO_FRAME, 0)
        if port is None:
            self._write_to_host(frame)
            return
        with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
            channel = socket.socket(fileno=self._writing)
            socket.send_fds(channel, [frame], [listener.fileno()])
            channel.detach()

    def serve(self) -> None:
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                for key, _ in self._selector.select():
                    if key.fd in self._selector.get_map():
                        key.data()
                self._reap_commands()
        while below := list_children(os.getpid()):
            for pid in below:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _handle_received_messages(self) -> None:
        try:
            piece = os.read(self._reading, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not piece:
            raise EOFError
        self._received += piece
        while len(self._received) >= FRAME_HEADER_STRUCT.size:
            number, kind, size = FRAME_HEADER_STRUCT.unpack_from(self._received)
            if len(self._received) < FRAME_HEADER_STRUCT.size + size:
                return
            content = bytes(
                self._received[FRAME_HEADER_STRUCT.size : FRAME_HEADER_STRUCT.size + size]
            )
            del self._received[: FRAME_HEADER_STRUCT.size + size]
            self._handle_frame(number, kind, content)

    def _handle_frame(self, command_number: int, frame_kind: bytes, content: bytes) -> None:
        if frame_kind == BEGIN_FRAME:
            request = json.loads(content)
            if request["operation"] == "end":
                self._kill_all_descendants(command_number)
            else:
                self._begin_command(command_number, request)
            return
        command = self._commands.get(command_number)
        if command is None:  # it has ended meanwhile
            return
        if frame_kind == KILL_FRAME:
            kill_session(command.pid)
        elif content and command.stdin < 0:  # it reads no more
            self._send_frame(command_number, INPUT_TAKEN_FRAME, struct.pack("!I", len(content)))
        elif content:
            command.backlog.append(content)
            self._write_input_when_writable(command_number, command)
        else:
            command.is_input_over = True
            self._close_input(command)

    def _begin_command(self, command_number: int, request: dict[str, Any]) -> None:
        inner, outer = [], []
        for is_input in (True, False, False):
            reading, writing = os.pipe()
            inner.append(reading if is_input else writing)
            outer.append(writing if is_input else reading)
        try:
            pid = os.fork()
        except OSError as error:
            for one in (*inner, *outer):
                os.close(one)
            self._send_frame(
                command_number,
                STDERR_FRAME,
                f"sandbox: no process could be started: {error}".encode(),
            )
            self._send_frame(command_number, EXIT_CODE_FRAME, b"126")
            return
        if pid == 0:
            become_command_process(request, inner, self._request)
        for one in inner:
            os.close(one)
        for one in outer:
            os.set_blocking(one, False)
        command = Command(pid, outer[0], {outer[1]: STDOUT_FRAME, outer[2]: STDERR_FRAME})
        self._commands[command_number] = command
        for stream in command.streams:
            self._selector.register(
                stream,
                selectors.EVENT_READ,
                self._bind_arguments(self._forward_output, command_number, command, stream),
            )

    def _kill_all_descendants(self, command_number: int) -> None:
        while below := list_children(os.getpid()):
            for pid in below:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)  # children of those become this process's own
            self._reap_commands()
        self._send_frame(command_number, EXIT_CODE_FRAME, b"0")

    @staticmethod
    def _bind_arguments(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        return lambda: function(*arguments)

    def _write_input_when_writable(self, command_number: int, command: Command) -> None:
        if command.stdin >= 0 and command.stdin not in self._selector.get_map():
            self._selector.register(
                command.stdin,
                selectors.EVENT_WRITE,
                self._bind_arguments(self._write_next_input_piece, command_number, command),
            )

    def _write_next_input_piece(self, command_number: int, command: Command) -> None:
        piece = command.backlog.popleft()
        try:
            taken = os.write(command.stdin, piece)
        except BlockingIOError:
            taken = 0
        except OSError:  # it reads no more
            taken = len(piece) + sum(map(len, command.backlog))
            command.backlog.clear()
            command.is_input_over = True
        self._send_frame(command_number, INPUT_TAKEN_FRAME, struct.pack("!I", taken))
        if taken < len(piece):
            command.backlog.appendleft(piece[taken:])
        if not command.backlog:
            self._selector.unregister(command.stdin)
            self._close_input(command)

    def _close_input(self, command: Command) -> None:
        if command.stdin >= 0 and command.is_input_over and not command.backlog:
            os.close(command.stdin)
            command.stdin = -1

    def _forward_output(self, command_number: int, command: Command, stream: int) -> bool:
        try:
            piece = os.read(stream, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if piece:
            self._send_frame(command_number, command.streams[stream], piece)
            return True
        self._selector.unregister(stream)
        os.close(stream)
        del command.streams[stream]
        return False

    def _reap_commands(self) -> None:
        numbers = {command.pid: number for number, command in self._commands.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in numbers:  # an orphan
                continue
            command = self._commands.pop(numbers[pid])
            for stream in list(command.streams):
                for _ in range(64):  # a pipe holds no more; a child of its may go on writing
                    if not self._forward_output(numbers[pid], command, stream):
                        break
            for one in (command.stdin, *command.streams):
                if one >= 0:
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(one)
                    os.close(one)
            code = os.waitstatus_to_exitcode(status)
            self._send_frame(
                numbers[pid], EXIT_CODE_FRAME, str(code if code >= 0 else 128 - code).encode()
            )

    def _send_frame(self, command_number: int, frame_kind: bytes, content: bytes) -> None:
        self._write_to_host(
            FRAME_HEADER_STRUCT.pack(command_number, frame_kind, len(content)) + content
        )

    def _write_to_host(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._writing, rest) :]
            except BlockingIOError:  # a kernel may hand the channel over like this
                select.select([], [self._writing], [])


def become_command_process(
    request: dict[str, Any], pipes: list[int], server: dict[str, Any]
) -> None:
    code = 126
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for place, pipe in enumerate(pipes):
            os.dup2(pipe, place)
        os.closerange(
            3, os.sysconf("SC_OPEN_MAX")
        )  # pipes of other commands, which wait for an end
        if request["operation"] == "run":
            exec_program(request)
        # Imported here alone: it costs more than the start of the server.
        sys.path.insert(0, __file__.rpartition("/")[0])
        importlib.import_module("sandbox_files").run_file_operation(request, server)
        code = 0
    except FileNotFoundError as error:
        code = 127 if request["operation"] == "run" else 1
        write_error_to_stderr(error)
    except PermissionError as error:
        code = 126 if request["operation"] == "run" else 1
        write_error_to_stderr(error)
    except BaseException as error:  # boundary: whatever it is, the child ends here
        write_error_to_stderr(error)
    finally:
        os._exit(code)


def write_error_to_stderr(error: BaseException) -> None:
    os.write(2, f"sandbox: {error}\n".encode(errors="replace"))


def exec_program(request: dict[str, Any]) -> None:
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
    if (channel := request["channel_fd"]) is not None:
        os.dup2(channel, 0)
        os.dup2(channel, 1)
        os.close(channel)
    server = CommandServer(request)
    server.announce_ready()
    server.serve()


if __name__ == "__main__":
    main()
