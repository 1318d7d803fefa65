"""Host's end of the channel to a command server, which is not trusted.

A command gets its standard streams as descriptors: its output goes into pipes that are read here,
its input is a sealed file in memory. So the channel itself carries only numbers.
"""

import asyncio
import contextlib
import fcntl
import io
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from areal_hpc.sandbox.command_server import MAX_MESSAGE_BYTES, NOT_BEGUN_CODE, READY_MESSAGE

KILL_COMMAND_TIMEOUT_S = 10.0
"""Time limit for a server to kill a command, after which its sandbox is lost."""
_PIECE_BYTES = 1 << 16
_SEND_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command."""

    exit_code: int
    """0 after success; 127 if there is no such program; 128 + n after signal n."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    is_cut_off: bool = False
    """Whether it was killed because it printed more than `limits.output_bytes`."""
    has_begun: bool = True
    """Whether a process could be started for it."""

    @property
    def text(self) -> str:
        """Standard output, then standard error."""
        return (self.stdout + self.stderr).decode(errors="replace")


class OutputPipe:
    """Pipe for one of a command's output streams, which keeps the first `max_bytes`."""

    def __init__(self, max_bytes: int, excess: asyncio.Future[None]) -> None:
        self._max_bytes, self._excess = max_bytes, excess
        self._kept = io.BytesIO()
        self._loop = asyncio.get_running_loop()
        self._reading, writing = os.pipe()
        self.writing = os.fdopen(writing, "wb")
        os.set_blocking(self._reading, False)
        self._loop.add_reader(self._reading, self._read_piece)

    def read_rest(self) -> bytes:
        """Return the output of a command that has ended; its background processes may write on."""
        while self._read_piece():
            pass
        return self._kept.getvalue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        self.writing.close()

    def _read_piece(self) -> bool:
        room = self._max_bytes - self._kept.tell()
        try:
            piece = os.read(self._reading, _PIECE_BYTES)
        except BlockingIOError:
            return False
        self._kept.write(piece[:room])
        is_excess = len(piece) > room
        if is_excess and not self._excess.done():
            self._excess.set_result(None)
        if is_excess or not piece:
            self._loop.remove_reader(self._reading)
            return False
        return True


class CommandChannel:
    """Socket of messages to and from a command server.

    Methods that wait for a server that is gone raise EOFError. The server's process inherits
    `servers_end`, and `wait_for_hello` waits for its first message.
    """

    def __init__(self) -> None:
        self._socket, self.servers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        """Exit codes by the numbers of answers; None after the channel is closed."""
        self._next = 1
        self._reader: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()

    async def wait_for_hello(self) -> socket.socket | None:
        """Wait for the server, and return the sandbox's listening socket if it sends one."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)
        message, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        listener = socket.socket(fileno=descriptors[0]) if descriptors else None
        if message != READY_MESSAGE:
            if listener is not None:
                listener.close()
            raise EOFError
        self._reader = asyncio.create_task(self._read_exit_codes())
        return listener

    async def run(
        self,
        request: dict[str, Any],
        stdin: bytes,
        max_stream_bytes: int,
        timeout_s: float,
        descriptors: Sequence[int] = (),
    ) -> CommandResult:
        """Run a command to its end, and kill it after `timeout_s`.

        The command inherits `descriptors` from number 3 on; they are closed here.
        """
        content, excess = json.dumps(request).encode(), asyncio.Future[None]()
        number, answer = self._await_answer()
        timed_out = False
        with contextlib.ExitStack() as stack:
            stack.callback(self._ends.pop, number)
            passed_descriptors = stack.enter_context(contextlib.ExitStack())
            for descriptor in descriptors:
                passed_descriptors.callback(os.close, descriptor)
            outputs = [stack.enter_context(OutputPipe(max_stream_bytes, excess)) for _ in "12"]
            try:
                async with asyncio.timeout(timeout_s):
                    with _open_input(content) as request_file, _open_input(stdin) as stdin_file:
                        files = [request_file, stdin_file, *(output.writing for output in outputs)]
                        numbers = [file.fileno() for file in files]
                        await self._send(f"begin {number}", [*numbers, *descriptors])
                    passed_descriptors.close()
                    for output in outputs:
                        output.writing.close()
                    await asyncio.wait((answer, excess), return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        await self._send(f"kill {number}")
                        await asyncio.wait((answer,))
            except TimeoutError:
                timed_out = True
                await self._kill(number, answer)
            except asyncio.CancelledError:
                with contextlib.suppress(EOFError, TimeoutError):
                    async with asyncio.timeout(KILL_COMMAND_TIMEOUT_S):
                        await self._send(f"kill {number}")
                raise
            exit_code = _require_exit_code(answer)
            stdout, stderr = (output.read_rest() for output in outputs)
        has_begun = exit_code != NOT_BEGUN_CODE
        if not has_begun:
            exit_code = 126
        return CommandResult(exit_code, stdout, stderr, timed_out, excess.done(), has_begun)

    async def kill_all(self, timeout_s: float) -> None:
        """Kill all commands of the sandbox and their descendants."""
        number, answer = self._await_answer()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(f"end {number}")
                await asyncio.wait((answer,))
        except TimeoutError:
            raise EOFError from None
        finally:
            del self._ends[number]
        _require_exit_code(answer)

    async def close(self) -> None:
        """Close the channel, which ends the server and its sandbox."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        self._mark_closed()
        self._socket.close()
        self.servers_end.close()

    def _await_answer(self) -> tuple[int, asyncio.Future[int | None]]:
        number, self._next = self._next, self._next + 1
        answer = self._ends[number] = asyncio.get_running_loop().create_future()
        return number, answer

    async def _kill(self, command_number: int, answer: asyncio.Future[int | None]) -> None:
        try:
            async with asyncio.timeout(KILL_COMMAND_TIMEOUT_S):
                await self._send(f"kill {command_number}")
                await asyncio.wait((answer,))
        except TimeoutError:  # a process of the sandbox has stopped the server
            raise EOFError from None

    async def _send(self, message: str, descriptors: Sequence[int] = ()) -> None:
        while not self.closed.is_set():
            try:
                socket.send_fds(self._socket, [message.encode()], descriptors)
                return
            except BlockingIOError:  # the server is busy, or was stopped
                await asyncio.sleep(_SEND_PAUSE_S)
            except OSError:
                break
        raise EOFError

    async def _read_exit_codes(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, ValueError):
            while message := await loop.sock_recv(self._socket, MAX_MESSAGE_BYTES):
                number, exit_code = map(int, message.split())
                if (answer := self._ends.get(number)) is not None and not answer.done():
                    answer.set_result(exit_code)
        self._mark_closed()

    def _mark_closed(self) -> None:
        self.closed.set()
        for answer in self._ends.values():
            if not answer.done():
                answer.set_result(None)


def _open_input(content: bytes) -> IO[bytes]:
    """Open a file in memory with this content, sealed against changes."""
    if not content:
        return Path(os.devnull).open("rb")
    file = os.fdopen(os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _require_exit_code(answer: asyncio.Future[int | None]) -> int:
    exit_code = answer.result()
    if exit_code is None:
        raise EOFError
    return exit_code
