"""A pool of warm sandboxes: each is used once, and one that died is not handed out."""

import asyncio
import os
import signal

from areal_hpc.sandbox.pool import SandboxPool
from areal_hpc.sandbox.runtimes import make_runtime
from areal_hpc.sandbox.spec import SandboxSpec
from tests.support.deadlines import scaled


def test_the_second_to_take_one_sees_nothing_of_the_first() -> None:
    async def scene() -> None:
        pool = SandboxPool(make_runtime("bwrap"), SandboxSpec(), 1)
        await pool.fill()
        async with pool.acquire() as first:
            await first.exec("echo secret > left; setsid sleep 300 > /dev/null &")
        async with pool.acquire() as second:
            seen = (await second.exec("ls -A . /tmp; cat /proc/[0-9]*/cmdline")).stdout
            assert b"left" not in seen
            assert b"sleep" not in seen
        assert not first.is_alive
        await pool.close()

    asyncio.run(scene())


def test_one_that_died_while_it_waited_is_replaced() -> None:
    async def scene() -> None:
        pool = SandboxPool(make_runtime("bwrap"), SandboxSpec(), 1)
        await pool.fill()
        dead = pool._warm[0]
        os.kill(dead.pid, signal.SIGKILL)
        dead._process.wait()
        async with pool.acquire() as taken:
            assert taken is not dead
            assert (await taken.exec("echo on")).stdout == b"on\n"
        await pool.close()

    asyncio.run(scene())


def test_a_sandbox_is_ended_when_its_time_is_over() -> None:
    async def scene() -> None:
        pool = SandboxPool(make_runtime("bwrap"), SandboxSpec(), 0)
        async with pool.acquire() as taken:
            taken.start_lifetime_limit(1.0)
            await asyncio.wait_for(taken._channel.closed.wait(), scaled(30))
            assert not taken.is_alive
        await pool.close()

    asyncio.run(scene())
