"""No isolation: commands run as the user, in a folder of their own, with limits."""

import functools
import os
import shutil
import sys
import tempfile

from areal_hpc.sandbox.runtimes.guest import SERVER_SCRIPTS, build_command_server_command
from areal_hpc.sandbox.sandbox import Sandbox, SandboxStartPlan
from areal_hpc.sandbox.spec import Network, SandboxSpec


class HostRuntime:
    """Folders on this machine. Their commands can do all that the user can."""

    name = "none"
    networks: tuple[Network, ...] = ("open",)
    supports_root_file_system = False

    async def start(self, spec: SandboxSpec) -> Sandbox:
        folder = tempfile.mkdtemp(prefix="areal-hpc-agent-")
        command = build_command_server_command(
            spec,
            [sys.executable, "-I", "-S"],
            str(SERVER_SCRIPTS[0]),
            writable_folders=[folder],
            counts_processes=False,
            origin=folder,
        )
        variables = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": folder,
            "LC_ALL": "C.UTF-8",
            "TMPDIR": folder,
        }
        remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
        plan = SandboxStartPlan(command, folder, spec.limits, variables, on_stop=remove)
        return await Sandbox.start(plan)
