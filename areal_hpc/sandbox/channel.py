"""Host's end of the channel to a command server, which is not trusted."""

import asyncio
import contextlib
import io
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.sandbox.command_server import (
    BEGIN_FRAME,
    CHUNK_BYTES,
    EXIT_CODE_FRAME,
    FRAME_HEADER_STRUCT,
    HELLO_FRAME,
    INPUT_FRAME,
    INPUT_TAKEN_FRAME,
    KILL_FRAME,
    STDERR_FRAME,
    STDOUT_FRAME,
)

MAX_UNREAD_INPUT_BYTES = 1 << 20
"""Input that is under way to a command which has not read it."""
KILL_COMMAND_TIMEOUT_S = 10.0
"""Longest time in which a server kills a command; if it takes longer its sandbox is lost."""


@dataclass(slots=True)
class RunningCommand:
    """A command as its host sees it."""

    max_stream_bytes: int
    """Kept of each of its two streams."""
    stdout: io.BytesIO = field(default_factory=io.BytesIO)
    """As its sibling a buffer that gives its content without a copy of it."""
    stderr: io.BytesIO = field(default_factory=io.BytesIO)
    is_cut_off: bool = False
    """It printed more, and is killed."""
    exit_code: int | None = None
    unread_input_bytes: int = 0
    """Bytes of input that it has not read."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    has_read: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_waiters(self) -> None:
        self.changed.set()
        self.has_read.set()


class CommandChannel:
    """Frames to and from a command server, over one socket.

    The server's end is handed to a process, for whose first frame
    `wait_for_hello` waits.
    """

    def __init__(self) -> None:
        self._socket, self.servers_end = socket.socketpair()
        self._socket.setblocking(False)
        self._commands: dict[int, RunningCommand] = {}
        self._next = 1
        self._turn = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()

    async def wait_for_hello(self) -> socket.socket | None:
        """Wait for the server; the socket that listens within the sandbox, if it sends one."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)
        data, descriptors, _, _ = socket.recv_fds(self._socket, FRAME_HEADER_STRUCT.size, 1)
        listener = socket.socket(fileno=descriptors[0]) if descriptors else None
        if len(data) != FRAME_HEADER_STRUCT.size or FRAME_HEADER_STRUCT.unpack(data) != (
            0,
            HELLO_FRAME,
            0,
        ):
            if listener is not None:
                listener.close()
            raise EOFError
        self._reader = asyncio.create_task(self._read_frames_until_closed())
        return listener

    async def run(
        self, request: dict[str, Any], stdin: bytes, max_stream_bytes: int, timeout_s: float
    ) -> tuple[RunningCommand, bool]:
        """A command that has ended, and whether that is because it took too long.

        Raises:
            EOFError: The server is gone.
            TypeError: The request is no JSON.
        """
        begin = json.dumps(request).encode()
        number, command = self._next, RunningCommand(max_stream_bytes)
        self._next += 1
        self._commands[number] = command
        feeding = asyncio.create_task(self._feed_command(number, command, begin, stdin))
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for_end(number, command)
            return command, False
        except TimeoutError:
            await self._kill_command(number, command)
            return command, True
        except asyncio.CancelledError:
            with contextlib.suppress(EOFError, TimeoutError):
                async with asyncio.timeout(KILL_COMMAND_TIMEOUT_S):
                    await self._send_frame(number, KILL_FRAME)
            raise
        finally:
            del self._commands[number]
            feeding.cancel()

    async def close(self) -> None:
        """Let the server go: it ends, and its sandbox with it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        self._wake_all_as_closed()
        # A write that the server does not take ends first: the loop would go on watching its
        # number, and fail whoever gets that next.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        async with self._turn:
            self._socket.close()
        self.servers_end.close()

    async def _wait_for_end(self, command_number: int, command: RunningCommand) -> None:
        was_killed = False
        while command.exit_code is None:
            if self.closed.is_set():
                raise EOFError
            if command.is_cut_off and not was_killed:
                was_killed = True
                await self._send_frame(command_number, KILL_FRAME)
            await command.changed.wait()
            command.changed.clear()

    async def _kill_command(self, command_number: int, command: RunningCommand) -> None:
        try:
            async with asyncio.timeout(KILL_COMMAND_TIMEOUT_S):
                await self._send_frame(command_number, KILL_FRAME)
                await self._wait_for_end(command_number, command)
        except TimeoutError:  # the server was stopped, by what it started
            raise EOFError from None

    async def _feed_command(
        self, command_number: int, command: RunningCommand, begin_json: bytes, stdin: bytes
    ) -> None:
        with contextlib.suppress(EOFError):
            await self._send_frame(command_number, BEGIN_FRAME, begin_json)
            rest = memoryview(stdin)
            while rest:
                piece, rest = rest[:CHUNK_BYTES], rest[CHUNK_BYTES:]
                while (
                    command.unread_input_bytes > MAX_UNREAD_INPUT_BYTES and not self.closed.is_set()
                ):
                    await command.has_read.wait()
                    command.has_read.clear()
                command.unread_input_bytes += len(piece)
                await self._send_frame(command_number, INPUT_FRAME, bytes(piece))
            await self._send_frame(command_number, INPUT_FRAME)

    async def _send_frame(
        self, command_number: int, frame_kind: bytes, content: bytes = b""
    ) -> None:
        frame = FRAME_HEADER_STRUCT.pack(command_number, frame_kind, len(content)) + content
        # A frame that was begun is sent to its end, whoever is cancelled meanwhile.
        if not await asyncio.shield(asyncio.ensure_future(self._write_frame(frame))):
            raise EOFError

    async def _write_frame(self, frame: bytes) -> bool:
        async with self._turn:
            try:
                await asyncio.get_running_loop().sock_sendall(self._socket, frame)
            except OSError:
                return False
        return True

    async def _read_frames_until_closed(self) -> None:
        loop, received = asyncio.get_running_loop(), bytearray()
        with contextlib.suppress(OSError, struct.error, ValueError):
            while piece := await loop.sock_recv(self._socket, 4 * CHUNK_BYTES):
                received += piece
                while len(received) >= FRAME_HEADER_STRUCT.size:
                    number, kind, size = FRAME_HEADER_STRUCT.unpack_from(received)
                    if size > CHUNK_BYTES:
                        raise ValueError("a frame is too long")
                    if len(received) < FRAME_HEADER_STRUCT.size + size:
                        break
                    content = bytes(
                        received[FRAME_HEADER_STRUCT.size : FRAME_HEADER_STRUCT.size + size]
                    )
                    del received[: FRAME_HEADER_STRUCT.size + size]
                    if command := self._commands.get(number):
                        self._apply_frame(command, kind, content)
        self._wake_all_as_closed()

    def _wake_all_as_closed(self) -> None:
        self.closed.set()
        for command in self._commands.values():
            command.wake_waiters()

    @staticmethod
    def _apply_frame(command: RunningCommand, frame_kind: bytes, content: bytes) -> None:
        if frame_kind in (STDOUT_FRAME, STDERR_FRAME):
            kept = command.stdout if frame_kind == STDOUT_FRAME else command.stderr
            room = command.max_stream_bytes - kept.tell()
            kept.write(content[:room])
            command.is_cut_off |= len(content) > room
        elif frame_kind == INPUT_TAKEN_FRAME:
            command.unread_input_bytes -= struct.unpack("!I", content)[0]
        elif frame_kind == EXIT_CODE_FRAME:
            command.exit_code = int(content)
        command.wake_waiters()
