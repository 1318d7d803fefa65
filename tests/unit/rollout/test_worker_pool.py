"""Pool of workers: one that is left mid-work is ended, and nobody waits for that but its user."""

import asyncio
import errno
import os
import subprocess
import sys
import threading

import pytest

from areal_hpc.agents.gyms.gym_worker import GymWorker
from areal_hpc.errors import WorkerLostError
from areal_hpc.rollout.execution.foreign_agent import OtherPythonAgentPool
from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.rollout.execution.worker_pool import WorkerPool


class Worker:
    """Takes its time to end, as a process with much memory does."""

    def __init__(self) -> None:
        self.is_usable = True
        self.may_end, self.has_ended = threading.Event(), False

    def close(self) -> None:
        self.has_ended = self.may_end.wait(20)


@pytest.mark.parametrize("breaks", ["while in use", "while idle"])
def test_the_event_loop_goes_on_while_a_worker_ends(breaks: str) -> None:
    workers = list[Worker]()

    async def start() -> Worker:
        workers.append(Worker())
        return workers[-1]

    async def scene() -> None:
        pool = WorkerPool(1, start)
        async with pool.acquire() as worker:
            worker.is_usable = breaks == "while idle"
            asyncio.get_running_loop().call_later(0.05, worker.may_end.set)
        worker.is_usable = False
        async with pool.acquire() as other:
            assert other is not worker

    asyncio.run(scene())
    assert workers[0].has_ended


def test_a_node_without_processes_costs_a_try_and_is_no_mistake_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", fail)  # as fork(2) does

    async def use_foreign_agent() -> None:
        async with OtherPythonAgentPool(sys.executable, "a.B", {}, 1, ()).acquire():
            pass

    for starting in (
        GymWorker.start(sys.executable, "counting_worker.py", {}, {}),
        use_foreign_agent(),
        ProcessPool(1).call(len, ""),
    ):
        with pytest.raises(WorkerLostError, match="cannot be started"):
            asyncio.run(starting)
