"""Processes that run a gym in its own Python, and the JSON lines to and from them."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.errors import AgentError, RecipeError
from areal_hpc.rollout.execution.line_process import LineProcess, select_variables

WORKERS_DIR = Path(__file__).with_name("workers")
MAX_LINE_BYTES = 64 << 20
"""An observation may be long."""
START_TIMEOUT_S = 300.0
"""Large packages on a loaded file system."""


class GymWorker:
    """One process, which plays one episode at a time."""

    def __init__(self, process: LineProcess, name: str) -> None:
        self._process, self._name = process, name

    @classmethod
    async def start(
        cls, python: str, script: str, config: Mapping[str, Any], variables: Mapping[str, str]
    ) -> "GymWorker":
        """A worker that has built its gym.

        Raises:
            RecipeError: There is no such Python, or the gym cannot be built.
        """
        command = [python, str(WORKERS_DIR / script)]
        environ = select_variables(os.environ, ()) | dict(variables)
        try:
            worker = cls(LineProcess(command, environ, script, MAX_LINE_BYTES), script)
        except OSError as error:
            raise RecipeError(
                f"there is no Python for this gym at {python}: {error.strerror}",
                key="rollout.workflow_kwargs.python",
                hint="scripts/setup_gyms.sh makes one",
            ) from error
        try:
            await worker.ask(config, START_TIMEOUT_S)
        except AgentError as error:
            worker.close()
            raise RecipeError(
                f"the gym cannot be built: {error.problems[0].message}",
                key="rollout.workflow_kwargs",
                hint="see what it printed; scripts/setup_gyms.sh has its packages",
            ) from error
        except BaseException:  # boundary: cancelled; nothing stays
            worker.close()
            raise
        return worker

    @property
    def is_usable(self) -> bool:
        """It lives, and waits for a request."""
        return self._process.is_usable

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """What it answers.

        Raises:
            AgentError: It fails, ends, takes too long or answers too much.
        """
        told = await self._process.ask(json.dumps(request).encode(), timeout_s)
        answer: dict[str, Any] = json.loads(told)
        if "error" in answer:
            raise AgentError(f"{self._name} failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it, with all that it started in its session."""
        self._process.close()


class GymWorkers:
    """At most so many workers, started when they are needed and used again."""

    def __init__(
        self,
        python: str,
        script: str,
        config: Mapping[str, Any],
        variables: Mapping[str, str],
        size: int,
    ) -> None:
        self._python, self._script = python, script
        self._config, self._variables = dict(config), dict(variables)
        self._size = size
        self._idle: list[GymWorker] = []
        self._places: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[GymWorker]:
        """A worker to oneself; waits while all are taken."""
        async with self._get_places():
            worker = await self._take()
            try:
                yield worker
            finally:
                if worker.is_usable:
                    self._idle.append(worker)
                else:
                    worker.close()

    def close(self) -> None:
        """End those that wait."""
        while self._idle:
            self._idle.pop().close()

    def _get_places(self) -> asyncio.Semaphore:
        """Those of this event loop: a process of mode `subproc` has one per episode."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._loop is not loop:
            self._places, self._loop = asyncio.Semaphore(self._size), loop
        return self._places

    async def _take(self) -> GymWorker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_usable:
                return worker
            worker.close()
        return await GymWorker.start(self._python, self._script, self._config, self._variables)
