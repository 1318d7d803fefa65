"""Agents that run in worker processes.

Such an agent reads the model's endpoint from environment variables. An episode has its process to
itself; one that hangs or crashes is replaced, and costs only that episode.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.processes.line_workers import WorkerPool
from areal_hpc.jobs.processes.process_ties import end_process, list_descendants
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.agent import Agent, load_agent
from areal_hpc.rollout.execution.agent_errors import build_agent_error, find_node_shortage
from areal_hpc.rollout.execution.agent_sandboxes import (
    acquire_sandbox,
    build_endpoint_variables,
    make_agent_sandboxes,
)
from areal_hpc.rollout.execution.process_pool import (
    MAX_ANSWER_BYTES,
    ProcessPool,
    WorkerProcess,
    select_driver_python_variables,
    select_passed_variables,
)

AGENT_WORKER_FILE = Path(__file__).with_name("agent_worker.py")


class SubprocessAgent:
    """Agent of `load_agent` whose episodes run in at most `size` processes.

    They run the driver's Python, or that of `rollout.agent.python`, which need not have areal_hpc.
    """

    def __init__(
        self,
        workflow: Any,
        kwargs: Mapping[str, Any],
        size: int,
        execution_config: AgentExecutionConfig | None = None,
    ) -> None:
        self._workflow, self._kwargs = workflow, dict(kwargs)
        self._config = config = execution_config
        passed_variables = config.variables if config is not None else ()
        self._other_python = config.python if config is not None else ""
        self._pool: WorkerPool[WorkerProcess] = (
            WorkerPool(size, partial(_start_other_python, self._other_python, passed_variables))
            if self._other_python
            else ProcessPool(size, select_driver_python_variables(os.environ, passed_variables))
        )

    async def check_agent_builds(self) -> None:
        """Build the agent once, so that errors show before any episode."""
        async with self._pool.acquire() as process:
            if self._other_python:
                await self._ask_other_python(process, do="build")
            else:
                await process.call(_check_agent_builds, self._workflow, self._kwargs)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Agent]:
        """Hold the agent in a process of its own; wait while all processes are in use."""
        async with self._pool.acquire() as process:
            yield _AgentInProcess(partial(self._run_episode, process))

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        async with self.acquire() as agent:
            return await agent.run(data, **extra_kwargs)

    def close(self) -> None:
        self._pool.close_idle_workers()

    async def _run_episode(
        self, process: WorkerProcess, data: dict[str, Any], variables: Mapping[str, str]
    ) -> Any:
        if self._other_python:
            return await self._ask_other_python(process, do="run", data=data, variables=variables)
        return await process.call(
            _run_episode_in_child, self._workflow, self._kwargs, self._config, data, variables
        )

    async def _ask_other_python(self, process: WorkerProcess, **request: Any) -> Any:
        agent = {"workflow": self._workflow, "kwargs": self._kwargs}
        line = json.dumps({**agent, "sys_path": list_user_import_folders(), **request}).encode()
        try:
            return await process.request(line)
        finally:
            for descendant in list_descendants(process.pid):
                end_process(descendant)


async def _start_other_python(python: str, variables: Sequence[str]) -> WorkerProcess:
    environ = select_passed_variables(os.environ, variables)
    command = {"args": [python, str(AGENT_WORKER_FILE)], "env": environ}
    try:
        return WorkerProcess(command, "the worker process", MAX_ANSWER_BYTES)
    except OSError as error:
        raise RecipeError(
            f"there is no Python for the agent at {python}: {error.strerror}",
            key="rollout.agent.python",
            hint="name an interpreter that every node has",
        ) from error


def list_user_import_folders() -> list[str]:
    """List the folders from which this process imports, except its own Python and packages."""
    prefixes = [os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    folders = (os.path.realpath(folder) for folder in sys.path if Path(folder).is_dir())
    return [
        folder
        for folder in folders
        if "site-packages" not in folder and not any(map(Path(folder).is_relative_to, prefixes))
    ]


class _AgentInProcess:
    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        self._run = run

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        variables = build_endpoint_variables(extra_kwargs["base_url"], extra_kwargs["api_key"])
        return await self._run(data, variables)


@asynccontextmanager
async def acquire_episode_agent(agent: Agent) -> AsyncIterator[Agent]:
    """Hold the agent for one episode, in a process if it needs one."""
    if isinstance(agent, SubprocessAgent):
        async with agent.acquire() as acquired:
            yield acquired
    else:
        yield agent


# In the worker process --------------------------------------------------------------------

_AGENT_CACHE: dict[str, Agent] = {}
"""Agents built in this process, by dotted path and arguments."""


def _load_agent_once(workflow: Any, kwargs: Mapping[str, Any]) -> Agent:
    if not isinstance(workflow, str):
        return load_agent(workflow, kwargs, extra_kwargs=())
    key = f"{workflow} {kwargs!r}"
    if key not in _AGENT_CACHE:
        _AGENT_CACHE[key] = load_agent(workflow, kwargs, extra_kwargs=())
    return _AGENT_CACHE[key]


def _check_agent_builds(workflow: Any, kwargs: Mapping[str, Any]) -> None:
    _load_agent_once(workflow, kwargs)


def _run_episode_in_child(
    workflow: Any,
    kwargs: Mapping[str, Any],
    execution_config: AgentExecutionConfig | None,
    data: dict[str, Any],
    variables: Mapping[str, str],
) -> Any:
    os.environ.update(variables)
    agent = _load_agent_once(workflow, kwargs)

    async def run() -> Any:
        sandboxes = (
            None if execution_config is None else make_agent_sandboxes(execution_config, warm=0)
        )
        # The driver kills this process and its descendants when the episode takes too long.
        async with acquire_sandbox(sandboxes, data) as sandbox:
            if sandbox is not None:
                url, key = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
                await sandbox.hand_to_agent(data, url, key, float("inf"))
            return await agent.run(data)

    try:
        return asyncio.run(run())
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:  # boundary: the agent is the user's code
        if (shortage := find_node_shortage(error)) is not None:
            raise shortage from None
        # Tracebacks cannot be sent, so their text goes into the message.
        raise build_agent_error(error, error.__traceback__) from None
