"""Runtimes that start sandboxes, by their names in a recipe, and a pool of warm sandboxes."""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.bwrap import BwrapRuntime, find_bubblewrap
from areal_hpc.sandbox.containers import CONTAINER_PROGRAMS, ContainerRuntime
from areal_hpc.sandbox.guest import (
    GUEST_DIR,
    NOBODY_UID,
    SERVER_SCRIPTS,
    WORK_DIR,
    build_server_command,
    may_become_nobody,
    require_python,
)
from areal_hpc.sandbox.sandbox import Sandbox, SandboxSpec, SandboxStartPlan


class Runtime(Protocol):
    """Runtime that starts sandboxes; `command_server.py` runs the commands in them."""

    name: str

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox, and return it when it is ready for commands.

        Raises:
            RecipeError: This machine cannot start such a sandbox.
            ClusterError: The sandbox did not start in time.
        """
        ...


class HostRuntime:
    """Runtime without isolation, in a folder of this machine: commands can do what the user can.

    With `as_nobody` commands and folders are user 65534's if this process is root's.
    """

    name = "none"

    def __init__(self, *, as_nobody: bool = False) -> None:
        self._user = NOBODY_UID if as_nobody and may_become_nobody() else None

    async def start(self, spec: SandboxSpec) -> Sandbox:
        folder = Path(tempfile.mkdtemp(prefix="areal-hpc-agent-"))
        files_folder, work = (Path(f"{folder}{path}") for path in (GUEST_DIR, WORK_DIR))
        files_folder.mkdir()
        work.mkdir()
        files = {script.name: script.read_bytes() for script in SERVER_SCRIPTS}
        for name, content in (files | dict(spec.files)).items():
            (files_folder / name).write_bytes(content)
        if self._user is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, self._user, self._user)
        python = sys.executable if self._user is None else require_python()[0]
        variables = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(work),
            "LC_ALL": "C.UTF-8",
            "TMPDIR": str(work),
        }
        plan = SandboxStartPlan(
            build_server_command(spec, [python, "-I", "-S"], host_folder=str(folder)),
            str(work),
            spec.limits,
            {**variables, **spec.variables},
            user=self._user,
            on_stop=partial(shutil.rmtree, folder, ignore_errors=True),
            files_folder=str(files_folder),
        )
        return await Sandbox.start(plan)


def make_runtime(isolation_name: str) -> Runtime:
    if isolation_name in CONTAINER_PROGRAMS:
        return ContainerRuntime(isolation_name)
    runtimes: dict[str, Callable[[], Runtime]] = {"bwrap": BwrapRuntime, "none": HostRuntime}
    return runtimes[isolation_name]()


def find_installed_runtimes() -> list[str]:
    containers = [name for name, program in CONTAINER_PROGRAMS.items() if program.find()]
    return [*(["bwrap"] if find_bubblewrap() is not None else []), *containers, "none"]


log = logging.getLogger(__name__)

START_TRIES = 3
"""Maximum number of starts of one sandbox, as a loaded node may fail to start it."""
RETRY_PAUSE_S = 1.0


class SandboxPool:
    """Pool that keeps `size` equal sandboxes ready."""

    def __init__(self, runtime: Runtime, spec: SandboxSpec, size: int) -> None:
        self._runtime, self._spec, self._size = runtime, spec, size
        self._warm: deque[Sandbox] = deque()
        self._filler: asyncio.Task[None] | None = None

    async def fill(self) -> None:
        """Start the first sandbox, which shows errors early; the others start in the background."""
        self._warm.append(await self._start_sandbox_with_retries())
        self._begin_refill()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """Hold a sandbox, and stop it in the end. A `spec` unlike the pool's starts a new one."""
        is_like_others = spec is None or spec == self._spec
        sandbox = await (
            self._take_warm() if is_like_others else self._start_sandbox_with_retries(spec)
        )
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    async def close(self) -> None:
        self._size = 0
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.wait({self._filler})
        while self._warm:
            await self._warm.popleft().stop()

    async def _take_warm(self) -> Sandbox:
        while self._warm:
            sandbox = self._warm.popleft()
            self._begin_refill()
            if sandbox.is_alive:
                return sandbox
            await sandbox.stop()
        self._begin_refill()
        return await self._start_sandbox_with_retries()

    async def _start_sandbox_with_retries(self, spec: SandboxSpec | None = None) -> Sandbox:
        for tries_left in reversed(range(START_TRIES)):
            try:
                return await self._runtime.start(spec or self._spec)
            except ClusterError as error:
                if not tries_left:
                    raise
                log.warning("a sandbox did not start, %d tries left: %s", tries_left, error)
            await asyncio.sleep(RETRY_PAUSE_S)
        raise AssertionError

    def _begin_refill(self) -> None:
        if self._filler is None or self._filler.done():
            self._filler = asyncio.create_task(self._start_missing())

    async def _start_missing(self) -> None:
        while len(self._warm) < self._size:
            try:
                self._warm.append(await self._runtime.start(self._spec))
            except (ClusterError, RecipeError) as error:  # the next `acquire` raises it, too
                log.warning("a warm sandbox did not start: %s", error)
                return
