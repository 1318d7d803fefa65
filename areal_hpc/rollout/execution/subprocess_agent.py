"""Agents that run in worker processes.

An agent in a process learns from the environment whom to call, as any program does. An episode
has its process to itself; one that hangs or crashes is replaced and costs that episode alone.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.reward import ISOLATION_VARIABLE
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.agent import Agent, load_agent
from areal_hpc.rollout.agent_errors import build_agent_error, find_node_shortage
from areal_hpc.rollout.execution.agent_sandboxes import (
    acquire_sandbox,
    build_endpoint_variables,
    make_agent_sandboxes,
)
from areal_hpc.rollout.execution.foreign_agent import OtherPythonAgentPool
from areal_hpc.rollout.execution.line_process import select_passed_variables
from areal_hpc.rollout.execution.process_pool import ProcessPool

SAME_PYTHON_PASSED_VARIABLES = (
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "VIRTUAL_ENV"),
    ISOLATION_VARIABLE,
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
)
"""Seen besides by agents that run with the driver's Python; none of them holds a secret."""


def select_driver_python_variables(
    environ: Mapping[str, str], extra_patterns: Sequence[str]
) -> dict[str, str]:
    """The variables that an agent sees which runs with the driver's Python in another process."""
    return select_passed_variables(environ, (*SAME_PYTHON_PASSED_VARIABLES, *extra_patterns))


class SubprocessAgent:
    """Runs the episodes of an agent that `load_agent` finds, in at most `size` processes."""

    def __init__(
        self,
        workflow: Any,
        kwargs: Mapping[str, Any],
        size: int,
        execution_config: AgentExecutionConfig | None = None,
    ) -> None:
        self._workflow = workflow
        self._kwargs = dict(kwargs)
        self._how = execution_config
        named = execution_config.variables if execution_config is not None else ()
        self._pool = ProcessPool(size, select_driver_python_variables(os.environ, named))
        self._foreign = (
            OtherPythonAgentPool(
                execution_config.python, workflow, kwargs, size, execution_config.variables
            )
            if execution_config is not None and execution_config.python
            else None
        )

    async def check_agent_builds(self) -> None:
        """Build the agent once, so that what is wrong with it is known before any episode.

        Raises:
            RecipeError: It cannot be built.
            WorkerStartError: No worker process can be started now.
        """
        if self._foreign is not None:
            await self._foreign.check_agent_builds()
            return
        await self._pool.call(_check_agent_builds, self._workflow, self._kwargs)

    @asynccontextmanager
    async def acquire_worker_agent(self) -> AsyncIterator[Agent]:
        """A process for one episode; waiting for it takes nothing from the episode's time."""
        if self._foreign is not None:
            async with self._foreign.acquire() as foreign:
                yield _WorkerAgentHandle(foreign.run)
            return
        async with self._pool.acquire() as process:
            yield _WorkerAgentHandle(
                partial(
                    process.call, _run_episode_in_child, self._workflow, self._kwargs, self._how
                )
            )

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        """Like `Agent.run`, including the wait for a process."""
        async with self.acquire_worker_agent() as agent:
            return await agent.run(data, **extra_kwargs)

    def close(self) -> None:
        """Kill idle processes. They die with this one in any case."""
        self._pool.kill_idle_processes()
        if self._foreign is not None:
            self._foreign.kill_idle_processes()


class _WorkerAgentHandle:
    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        self._run = run

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        variables = build_endpoint_variables(extra_kwargs["base_url"], extra_kwargs["api_key"])
        return await self._run(data, variables)


@asynccontextmanager
async def acquire_episode_agent(agent: Agent) -> AsyncIterator[Agent]:
    """The agent, with a process for one episode if it needs one."""
    if isinstance(agent, SubprocessAgent):
        async with agent.acquire_worker_agent() as one:
            yield one
    else:
        yield agent


# In the process ---------------------------------------------------------------------------

_AGENT_CACHE: dict[str, Agent] = {}
"""Agents built from dotted paths: once per process."""


def _get_or_load_agent(workflow: Any, kwargs: Mapping[str, Any]) -> Agent:
    if not isinstance(workflow, str):
        return load_agent(workflow, kwargs, extra_kwargs=())
    key = f"{workflow} {kwargs!r}"
    if key not in _AGENT_CACHE:
        _AGENT_CACHE[key] = load_agent(workflow, kwargs, extra_kwargs=())
    return _AGENT_CACHE[key]


def _check_agent_builds(workflow: Any, kwargs: Mapping[str, Any]) -> None:
    _get_or_load_agent(workflow, kwargs)


def _run_episode_in_child(
    workflow: Any,
    kwargs: Mapping[str, Any],
    execution_config: AgentExecutionConfig | None,
    data: dict[str, Any],
    variables: Mapping[str, str],
) -> Any:
    os.environ.update(variables)
    agent = _get_or_load_agent(workflow, kwargs)

    async def run() -> Any:
        sandboxes = (
            None
            if execution_config is None
            else make_agent_sandboxes(execution_config, warm=0, has_started=True)
        )
        # The driver ends this process, and all below it, when the episode takes too long.
        async with acquire_sandbox(sandboxes, data) as free:
            if free is not None:
                url, key = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
                await free.put_into_task_and_open_endpoint(data, url, key, float("inf"))
            return await agent.run(data)

    try:
        return asyncio.run(run())
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:  # boundary: the agent is the user's code
        if (shortage := find_node_shortage(error)) is not None:
            raise shortage from None
        # Tracebacks do not cross the pipe, so what they say goes into the message.
        raise build_agent_error(error, error.__traceback__) from None
