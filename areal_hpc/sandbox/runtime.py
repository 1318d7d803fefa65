"""What starts sandboxes."""

from typing import Protocol

from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.sandbox import Sandbox
from areal_hpc.sandbox.spec import Network, SandboxSpec

ISOLATION_RECIPE_KEY = "rollout.agent.isolation"


class Runtime(Protocol):
    """A way to start sandboxes. All of them run commands through `command_server.py`."""

    name: str
    networks: tuple[Network, ...]
    supports_root_file_system: bool
    """It can show another root file system than this machine's."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that is ready for commands.

        Raises:
            RecipeError: This machine cannot start it.
            ClusterError: It did not start in time.
        """
        ...


def build_isolation_error(program: str, hint: str, reason: str) -> RecipeError:
    """The error of a runtime whose program cannot isolate on this machine."""
    return RecipeError(
        f"{program} cannot isolate on this machine: {reason}",
        key=ISOLATION_RECIPE_KEY,
        hint=hint,
    )
