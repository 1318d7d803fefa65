"""Ways to start a sandbox, by their names in a recipe."""

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Protocol

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
from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.spec import SandboxSpec


class Runtime(Protocol):
    """A way to start sandboxes. All of them run commands through `command_server.py`."""

    name: str

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that is ready for commands.

        Raises:
            RecipeError: This machine cannot start it.
            ClusterError: It did not start in time.
        """
        ...


class HostRuntime:
    """Folders on this machine, without isolation: commands can do all that the user can.

    `as_nobody`: of root's they are user 65534's.
    """

    name = "none"

    def __init__(self, *, as_nobody: bool = False) -> None:
        self._user = NOBODY_UID if as_nobody and may_become_nobody() else None

    async def start(self, spec: SandboxSpec) -> Sandbox:
        folder = Path(tempfile.mkdtemp(prefix="areal-hpc-agent-"))
        shown, work = (Path(f"{folder}{one}") for one in (GUEST_DIR, WORK_DIR))
        shown.mkdir()
        work.mkdir()
        files = {script.name: script.read_bytes() for script in SERVER_SCRIPTS}
        for name, content in (files | dict(spec.files)).items():
            (shown / name).write_bytes(content)
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
            files_folder=str(shown),
        )
        return await Sandbox.start(plan)


def make_runtime(isolation_name: str) -> Runtime:
    if isolation_name in CONTAINER_PROGRAMS:
        return ContainerRuntime(isolation_name)
    return BwrapRuntime() if isolation_name == "bwrap" else HostRuntime()


def find_installed_runtimes() -> list[str]:
    containers = [name for name, one in CONTAINER_PROGRAMS.items() if one.find() is not None]
    return [*(["bwrap"] if find_bubblewrap() is not None else []), *containers, "none"]
