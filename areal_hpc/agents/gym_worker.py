"""Processes that run a gym in its own Python, and the JSON lines to and from them."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from areal_hpc.errors import AgentError, NodeResourceShortageError, RecipeError
from areal_hpc.jobs.processes.line_workers import SHORTAGE_HINT, LineProcess
from areal_hpc.rollout.execution.agent_errors import describe_errno_shortage
from areal_hpc.rollout.execution.process_pool import select_passed_variables
from areal_hpc.sandbox.isolated_worker import WorkerSettings, open_worker_command
from areal_hpc.sandbox.program import get_configured_isolation
from areal_hpc.sandbox.session_forwarder import HostForwarder, format_host

WORKERS_DIR = Path(__file__).with_name("gym_workers")
MAX_LINE_BYTES = 64 << 20
START_TIMEOUT_S = 300.0


class GymWorker(LineProcess):
    """Process that runs a gym, and plays one episode at a time."""

    _listener: socket.socket | None = None

    @classmethod
    async def start(
        cls,
        python: str,
        script: str,
        config: Mapping[str, Any],
        variables: Mapping[str, str],
        readonly_folders: Sequence[str],
        settings: WorkerSettings,
    ) -> "GymWorker":
        """Start a worker, isolated by `reward.isolation`, and wait until it has built its gym."""
        if get_configured_isolation() == "none":
            variables = select_passed_variables(os.environ, ()) | dict(variables)
        command_opener = open_worker_command(
            [WORKERS_DIR / script],
            settings,
            python=python,
            variables=variables,
            readonly_folders=readonly_folders,
        )
        try:
            with ExitStack() as stack:  # in a thread: it runs a Python, and may copy bubblewrap
                command = await asyncio.to_thread(stack.enter_context, command_opener)
                worker = cls(command, script, MAX_LINE_BYTES)
        except OSError as error:
            raise RecipeError(
                f"there is no Python for this gym at {python}: {error.strerror}",
                key="rollout.workflow_kwargs.python",
                hint="scripts/setup_gyms.sh of the repository makes one",
            ) from error
        try:
            if settings.proxy_port is not None:
                worker._listener = await worker.receive_socket(START_TIMEOUT_S)
                worker._listener.setblocking(False)
            async with worker.reach_hosts(settings.hosts):
                await worker.request(config, START_TIMEOUT_S)
        except AgentError as error:
            await asyncio.to_thread(worker.close)
            raise RecipeError(
                f"the gym cannot be built: {error.problems[0].message}",
                key="rollout.workflow_kwargs",
                hint="read its output. It is isolated (reward.isolation): it sees its Python, the "
                "folders in PYTHONPATH of `variables`, and `readonly_folders`",
            ) from error
        except BaseException:  # boundary: when cancelled, too, the worker ends
            await asyncio.to_thread(worker.close)
            raise
        return worker

    async def request(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        line = await self.ask(json.dumps(request).encode(), timeout_s)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            message = f"{self._name} failed: {answer['error']}"
            if describe_errno_shortage(answer["errnos"]):
                self.mark_unusable_after_shortage()
                raise NodeResourceShortageError(message, hint=SHORTAGE_HINT)
            raise AgentError(message)
        return answer

    @asynccontextmanager
    async def reach_hosts(self, hosts: Collection[str]) -> AsyncIterator[None]:
        """Let the worker reach these hosts, `HOST:PORT`, by HTTP within the context."""
        if self._listener is None:
            yield
            return
        forwarder = HostForwarder(self._listener.dup(), hosts)
        await forwarder.start()
        try:
            yield
        finally:
            await forwarder.close()

    def close(self) -> None:
        super().close()
        if self._listener is not None:
            self._listener.close()


def parse_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Check a recipe's hosts, each `HOST:PORT`, and return them as the forwarder compares them."""
    parsed_hosts = tuple(format_host(f"https://{host}") for host in hosts)
    for host, parsed in zip(hosts, parsed_hosts, strict=True):
        if not parsed or str(host).lower() != parsed:
            raise RecipeError(
                f"a gym reaches hosts that are named as HOST:PORT, got {host!r}",
                key="rollout.workflow_kwargs.hosts",
                hint='give a list such as ["api.example.com:443"]',
            )
    return parsed_hosts


def get_host_of_url(url: str, key: str) -> str:
    """Return `HOST:PORT` of the URL that a recipe has at `key`."""
    if host := format_host(url):
        return host
    raise RecipeError(f"{url!r} is no URL", key=key, hint="give one such as http://HOST:PORT/PATH")
