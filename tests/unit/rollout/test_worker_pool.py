"""Worker pool: a worker that is left mid-work is ended, and only its user waits for that."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from areal_hpc.agents.gym_worker import GymWorker
from areal_hpc.errors import NodeResourceShortageError, WorkerStartError
from areal_hpc.jobs.processes.line_workers import WorkerPool
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.rollout.execution.subprocess_agent import SubprocessAgent
from areal_hpc.sandbox.isolated_worker import WorkerSettings
from tests.support.deadlines import scaled


class Worker:
    """Worker that ends slowly, as a process with much memory does."""

    def __init__(self) -> None:
        self.is_usable = True
        self.may_end, self.has_ended = threading.Event(), False

    def close(self) -> None:
        self.has_ended = self.may_end.wait(scaled(20))


@pytest.mark.asyncio
@pytest.mark.parametrize("breaks", ["while in use", "while idle"])
async def test_the_event_loop_goes_on_while_a_worker_ends(breaks: str) -> None:
    workers = list[Worker]()

    async def start() -> Worker:
        workers.append(Worker())
        return workers[-1]

    pool = WorkerPool(1, start)
    async with pool.acquire() as worker:
        worker.is_usable = breaks == "while idle"
        asyncio.get_running_loop().call_later(0.05, worker.may_end.set)
    worker.is_usable = False
    async with pool.acquire() as other:
        assert other is not worker
    assert workers[0].has_ended


@pytest.mark.parametrize(
    ("module", "function", "code"),
    [
        (subprocess, "Popen", errno.EAGAIN),
        (subprocess, "Popen", errno.ESTALE),
        (socket, "socketpair", errno.EMFILE),
    ],
    ids=["no process", "silent storage", "no descriptor"],
)
def test_a_worker_that_cannot_start_now_is_the_node_s_and_no_mistake_of_the_recipe(
    module: ModuleType, function: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    async def use_foreign_agent() -> None:
        how = AgentExecutionConfig(mode="subproc", python=sys.executable)
        await SubprocessAgent("a.B", {}, 1, how).check_agent_builds()

    for starting in (
        GymWorker.start(sys.executable, "gymnasium_worker.py", {}, {}, (), WorkerSettings()),
        use_foreign_agent(),
        ProcessPool(1).call(len, ""),
    ):

        async def scene(work: Coroutine[Any, Any, Any] = starting) -> None:
            monkeypatch.setattr(module, function, fail)  # an event loop needs a pair of its own
            await work

        with pytest.raises(WorkerStartError, match="cannot be started"):
            asyncio.run(scene())
        monkeypatch.undo()


@pytest.mark.asyncio
async def test_a_process_that_ran_short_is_not_used_again_and_one_whose_call_raised_is() -> None:
    pool = ProcessPool(1)
    first = await pool.call(os.getpid)
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.call(int, "x")
    assert await pool.call(os.getpid) == first
    with pytest.raises(NodeResourceShortageError, match="No space left"):
        await pool.call(Path.write_text, Path("/dev/full"), "x")
    assert await pool.call(os.getpid) != first, "it may lack what it left open itself"
    pool.close_idle_workers()
