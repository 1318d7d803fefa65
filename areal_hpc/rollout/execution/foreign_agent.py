"""Agents that run with another Python than the driver's (`rollout.agent.python`)."""

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.errors import AgentError, NodeResourceShortageError, RecipeError, WorkerLostError
from areal_hpc.jobs.processes.descendants import kill_and_reap_process, list_descendants
from areal_hpc.rollout.execution.answers import MAX_ANSWER_BYTES, decode_returned_or_raise
from areal_hpc.rollout.execution.line_process import LineProcess, select_passed_variables
from areal_hpc.rollout.execution.worker_pool import WorkerPool

AGENT_WORKER_FILE = Path(__file__).with_name("agent_worker.py")


class OtherPythonAgentPool:
    """At most `size` processes of another Python, one episode each at a time."""

    def __init__(
        self,
        python: str,
        workflow: str,
        kwargs: Mapping[str, Any],
        size: int,
        variables: Sequence[str],
    ) -> None:
        self._request = {
            "workflow": workflow,
            "kwargs": dict(kwargs),
            "sys_path": list_user_import_folders(),
        }

        async def start() -> LineProcess:
            return _start_worker(python, select_passed_variables(os.environ, variables))

        self._processes = WorkerPool(size, start)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator["OtherPythonAgentProcess"]:
        """A process to oneself; waits while all are taken. What it started ends with its turn."""
        async with self._processes.acquire() as process:
            try:
                yield OtherPythonAgentProcess(process, self._request)
            finally:
                for one in list_descendants(process.pid):
                    kill_and_reap_process(one)

    async def check_agent_builds(self) -> None:
        """Build the agent once.

        Raises:
            RecipeError: It cannot be built.
            WorkerStartError: No worker process can be started now.
        """
        async with self.acquire() as process:
            await process.ask({"do": "build"})

    def kill_idle_processes(self) -> None:
        """Kill idle processes."""
        self._processes.close_idle_workers()


def _start_worker(python: str, environ: Mapping[str, str]) -> LineProcess:
    try:
        command = {"args": [python, str(AGENT_WORKER_FILE)], "env": environ}
        return LineProcess(command, "the worker process", MAX_ANSWER_BYTES)
    except OSError as error:
        raise RecipeError(
            f"there is no Python for the agent at {python}: {error.strerror}",
            key="rollout.agent.python",
            hint="name an interpreter that every node has",
        ) from error


def list_user_import_folders() -> list[str]:
    """Folders from which this process imports, but for those of its own Python and packages."""
    own = [os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    found = (os.path.realpath(folder) for folder in sys.path if Path(folder).is_dir())
    return [
        folder
        for folder in found
        if "site-packages" not in folder and not any(map(Path(folder).is_relative_to, own))
    ]


class OtherPythonAgentProcess:
    """A process for one episode."""

    def __init__(self, process: LineProcess, request: Mapping[str, Any]) -> None:
        self._process, self._request = process, request

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """What the agent returned, or raises what it raised.

        Raises:
            WorkerLostError: The process died.
            NodeResourceShortageError: The node lacks something; the process is not used again.
        """
        line = json.dumps({**self._request, **request}).encode()
        try:
            answer = await self._process.ask(line)
        except AgentError as error:
            raise WorkerLostError(error.problems[0].message) from error
        try:
            return decode_returned_or_raise(answer)
        except NodeResourceShortageError:
            self._process.mark_unusable_after_shortage()
            raise

    async def run(self, data: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
        """Play a task; `variables` tell the agent whom to call."""
        return await self.ask({"do": "run", "data": data, "variables": variables})
