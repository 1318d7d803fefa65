"""Sandboxes of agents: one for each episode, as the recipe configures them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.errors import ClusterError, RecipeError, SandboxLostError, SandboxStartError
from areal_hpc.jobs.processes.line_workers import SHORTAGE_HINT
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.recipe.sections.sandbox import SandboxConfig
from areal_hpc.reward.harbor import HarborTask, find_harbor_task
from areal_hpc.rollout.execution.agent_errors import SHORTAGE_ERRNOS
from areal_hpc.rundir.files import write_atomic
from areal_hpc.sandbox.guest import ISOLATION_RECIPE_KEY
from areal_hpc.sandbox.images import read_image
from areal_hpc.sandbox.runtimes import Runtime, SandboxPool, make_runtime
from areal_hpc.sandbox.sandbox import Network, Sandbox, SandboxLimits, SandboxSpec

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 1 << 20
"""Size of the tar of an episode's kept files; those of an episode with more are not kept."""
SANDBOX_TASK_COLUMN = "sandbox"
"""Column of the agent's task that holds its sandbox."""


class AgentSandboxes:
    """Pool of sandboxes for the agents of this process.

    A sandbox has started on this machine before any episode (`try_sandbox`), so a later start that
    fails is worth another try.
    """

    def __init__(
        self, runtime: Runtime, spec: SandboxSpec, warm: int, keep_files: Sequence[str] = ()
    ) -> None:
        self._pool, self._keep_files = SandboxPool(runtime, spec, warm), keep_files
        self._spec, self._takes_root = spec, runtime.name != "none"

    async def fill(self) -> None:
        """Start a sandbox, so that errors show before any episode."""
        await self._pool.fill()

    @asynccontextmanager
    async def acquire(self, data: Mapping[str, Any]) -> "AsyncIterator[EpisodeSandbox]":
        """Hold a sandbox for one episode of a task, and stop it in the end.

        Raises:
            RecipeError: The task is Harbor's, and this runtime cannot show its files.
            SandboxStartError: The sandbox did not start; another try may succeed.
        """
        spec, task = self._spec, find_harbor_task(data)
        if task is not None:
            if not self._takes_root:
                raise RecipeError(
                    "Harbor's tasks need a sandbox",
                    key="rollout.agent.isolation",
                    hint="use rollout.agent.isolation=bwrap",
                )
            spec = task.apply_task_to_sandbox_spec(spec)
        async with AsyncExitStack() as ends:
            try:
                sandbox = await ends.enter_async_context(self._pool.acquire(spec))
            except (ClusterError, RecipeError) as error:
                first = error.problems[0]
                if isinstance(error, RecipeError) and first.key != ISOLATION_RECIPE_KEY:
                    raise
                raise SandboxStartError(first.message, key=first.key, hint=first.hint) from error
            except OSError as error:
                if error.errno not in SHORTAGE_ERRNOS:
                    raise
                message = f"a sandbox could not be started: {error}"
                raise SandboxStartError(message, hint=SHORTAGE_HINT) from error
            yield EpisodeSandbox(sandbox, spec.network != "none", task, self._keep_files)

    async def close(self) -> None:
        await self._pool.close()


class EpisodeSandbox:
    """Sandbox that is not yet passed to an agent."""

    def __init__(
        self,
        sandbox: Sandbox,
        holds_session: bool,
        task: HarborTask | None = None,
        keep_files: Sequence[str] = (),
    ) -> None:
        self._sandbox, self._has_session, self._task = sandbox, holds_session, task
        self._keep_files = keep_files

    async def hand_to_agent(
        self, data: dict[str, Any], base_url: str, api_key: str, lifetime_s: float
    ) -> None:
        """Put the sandbox into the agent's task, and let its commands reach the model's endpoint.

        The sandbox ends after `lifetime_s` at the latest.

        Raises:
            RecipeError: The task already has that column, or files that do not fit.
        """
        if SANDBOX_TASK_COLUMN in data:
            raise RecipeError(
                f"the task has a column {SANDBOX_TASK_COLUMN!r}, which the agent's sandbox would "
                "replace",
                key=SANDBOX_TASK_COLUMN,
                hint="rename the column, or set rollout.agent.isolation=null",
            )
        if self._task is not None:
            await self._task.prepare(self._sandbox)
        if self._has_session:
            url = await self._sandbox.open_model_endpoint(base_url.removesuffix("/v1"))
            self._sandbox.base_url = f"{url}/v1"
            self._sandbox.add_variables(build_endpoint_variables(f"{url}/v1", api_key))
        self._sandbox.start_lifetime_limit(lifetime_s)
        data[SANDBOX_TASK_COLUMN] = self._sandbox

    async def keep_files(self, archive: Path) -> None:
        """Write the files that the recipe keeps to a tar; log an error, which costs no episode."""
        if not self._keep_files:
            return
        try:
            content = await self._sandbox.pack("", MAX_KEPT_BYTES, self._keep_files)
            await asyncio.to_thread(write_atomic, archive, content)
        except (OSError, SandboxLostError) as error:
            log.warning("the files of %s are not kept: %s", archive.stem, error)


def build_endpoint_variables(base_url: str, api_key: str) -> Mapping[str, str]:
    """Build the environment variables from which SDKs read the endpoint and its key."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its SDK adds `/v1` itself
        "ANTHROPIC_API_KEY": api_key,
    }


@asynccontextmanager
async def acquire_sandbox(
    sandboxes: AgentSandboxes | None, data: Mapping[str, Any]
) -> AsyncIterator[EpisodeSandbox | None]:
    """Hold a sandbox for one episode of a task; None if agents get none."""
    if sandboxes is None:
        yield None
        return
    async with sandboxes.acquire(data) as sandbox:
        yield sandbox


def make_agent_sandboxes(
    execution_config: AgentExecutionConfig, warm: int | None = None
) -> AgentSandboxes | None:
    """Make the sandboxes that a recipe configures; None if agents get none."""
    if execution_config.isolation is None:
        return None
    runtime = make_runtime(execution_config.isolation)
    pool_size = execution_config.sandbox.warm if warm is None else warm
    spec = build_sandbox_spec(execution_config.sandbox, runtime)
    return AgentSandboxes(runtime, spec, pool_size, execution_config.sandbox.keep_files)


def build_sandbox_spec(config: SandboxConfig, runtime: Runtime) -> SandboxSpec:
    """Build the spec for a recipe's section and a runtime."""
    network: Network = "open" if runtime.name == "none" else config.network
    if config.root and not Path(config.root).exists():
        raise RecipeError(
            f"there is no root file system {config.root}",
            key="rollout.agent.sandbox.root",
            hint="put its folder, a tar of it or an image there, on every node",
        )
    missing = [folder for folder in config.readonly_folders if not Path(folder).is_dir()]
    if missing:
        raise RecipeError(
            f"there is no folder {', '.join(missing)}",
            key="rollout.agent.sandbox.readonly_folders",
            hint="put it there, on every node",
        )
    limits = SandboxLimits(config.memory_bytes, config.processes, config.disk_bytes, config.files)
    root = Path(config.root).resolve() if config.root else None
    image = read_image(root) if root is not None and root.is_file() else None
    return SandboxSpec(
        root,
        network,
        limits,
        variables={} if image is None else image.variables,
        readonly_folders=config.readonly_folders,
    )


async def try_sandbox(execution_config: AgentExecutionConfig) -> None:
    """Start and stop a sandbox on this machine, if agents get any."""
    sandboxes = make_agent_sandboxes(execution_config, warm=0)
    if sandboxes is not None:
        await sandboxes.fill()
        await sandboxes.close()


def check_sandbox_starts(agent: dict[str, Any]) -> None:
    """Start and stop the sandbox of a section `rollout.agent` on this machine."""
    asyncio.run(try_sandbox(AgentExecutionConfig.model_validate(agent)))
