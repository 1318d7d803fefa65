"""Warm sandboxes are used once, dead ones are replaced, and failed starts leave no process."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from areal_hpc.sandbox.runtimes import SandboxPool, make_runtime
from areal_hpc.sandbox.sandbox import Sandbox, SandboxLimits, SandboxSpec, SandboxStartPlan
from tests.support.deadlines import scaled

pytestmark = pytest.mark.asyncio


async def test_the_second_to_take_one_sees_nothing_of_the_first() -> None:
    pool = SandboxPool(make_runtime("bwrap"), SandboxSpec(), 1)
    await pool.fill()
    async with pool.acquire() as first:
        await first.exec("echo secret > left; setsid sleep 300 > /dev/null &")
    async with pool.acquire() as second:
        output = (await second.exec("ls -A . /tmp; cat /proc/[0-9]*/cmdline")).stdout
        assert b"left" not in output
        assert b"sleep" not in output
    assert not first.is_alive
    await pool.close()


async def test_one_that_died_while_it_waited_is_replaced() -> None:
    pool = SandboxPool(make_runtime("bwrap"), SandboxSpec(), 1)
    await pool.fill()
    dead = pool._warm[0]
    os.kill(dead.pid, signal.SIGKILL)
    dead._process.wait()
    async with pool.acquire() as sandbox:
        assert sandbox is not dead
        assert (await sandbox.exec("echo on")).stdout == b"on\n"
    await pool.close()


async def test_a_sandbox_is_ended_when_its_time_is_over() -> None:
    pool = SandboxPool(make_runtime("bwrap"), SandboxSpec(), 0)
    async with pool.acquire() as sandbox:
        sandbox.start_lifetime_limit(1.0)
        await asyncio.wait_for(sandbox._channel.closed.wait(), scaled(30))
        assert not sandbox.is_alive
    await pool.close()


def find_sleepers(seconds: str) -> list[str]:
    sleepers = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            sleepers += [path.parent.name] * (path.read_bytes() == f"sleep\0{seconds}\0".encode())
    return sleepers


async def test_a_start_that_is_cancelled_while_its_complaint_is_read_leaves_no_process() -> None:
    silent = ["/bin/sh", "-c", "exec <&- >&- sleep 273.5"]
    plan = SandboxStartPlan(silent, "/", SandboxLimits(), {})
    starting = asyncio.create_task(Sandbox.start(plan))
    while not find_sleepers("273.5"):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert starting.cancel()
    await asyncio.wait({starting})
    assert not find_sleepers("273.5")
