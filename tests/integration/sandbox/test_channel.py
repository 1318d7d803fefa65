"""The start of a sandbox whose server says nothing."""

import asyncio
from contextlib import suppress
from pathlib import Path

from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.spec import SandboxLimits


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
