"""The host's end of a channel, whatever becomes of the server."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from areal_hpc.sandbox.channel import CommandChannel
from areal_hpc.sandbox.command_server import FRAME_HEADER_STRUCT, HELLO_FRAME
from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.spec import SandboxLimits
from tests.support.deadlines import scaled


def test_a_channel_that_is_closed_in_a_write_leaves_its_number_to_others() -> None:
    async def scene() -> None:
        channel = CommandChannel()
        with channel.servers_end.dup() as server:
            server.sendall(FRAME_HEADER_STRUCT.pack(0, HELLO_FRAME, 0))
            await channel.wait_for_hello()
            number = channel._socket.fileno()
            writing = asyncio.create_task(
                channel.run({"operation": "unpack"}, bytes(4 << 20), 1024, 60.0)
            )
            await asyncio.sleep(0.2)  # more is under way than the server takes
            writing.cancel()
            await asyncio.wait({writing}, timeout=0.1)
            await channel.close()
            await asyncio.wait({writing})
        here, there = socket.socketpair()
        with here, there:
            assert number in (here.fileno(), there.fileno())
            for one, other in ((here, there), (there, here)):
                one.setblocking(False)
                reading = asyncio.create_task(asyncio.get_running_loop().sock_recv(one, 8))
                await asyncio.sleep(0.05)
                other.send(b"hello")
                assert await asyncio.wait_for(reading, scaled(5.0)) == b"hello"

    asyncio.run(scene())


def find_sleepers(seconds: str) -> list[str]:
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found += [one.parent.name] * (one.read_bytes() == f"sleep\0{seconds}\0".encode())
    return found


def test_a_start_that_is_cancelled_while_its_complaint_is_read_leaves_no_process() -> None:
    silent = ["/bin/sh", "-c", "exec <&- >&- sleep 273.5"]

    async def scene() -> None:
        plan = SandboxStartPlan(silent, "/", SandboxLimits(), {})
        starting = asyncio.create_task(Sandbox.start(plan))
        while not find_sleepers("273.5"):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert starting.cancel()
        await asyncio.wait({starting})
        assert not find_sleepers("273.5")

    asyncio.run(scene())
