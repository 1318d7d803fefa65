"""Recipe sections `rollout.agent.sandbox` and `reward`: isolation of agents and of programs."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from areal_hpc.recipe.base import BaseConfig

SandboxRuntime = Literal["bwrap", "podman", "apptainer", "enroot"]
SANDBOX_RUNTIMES: tuple[str, ...] = get_args(SandboxRuntime)
AgentIsolation = Literal[SandboxRuntime, "none"]


class SandboxConfig(BaseConfig):
    """Sandbox that each episode's agent gets as `data["sandbox"]`."""

    root: str = ""
    """Folder, tar or OCI archive of a root file system, on every node; empty: the node's own."""
    readonly_folders: tuple[Annotated[str, Field(pattern="^/")], ...] = ()
    """Further folders of the node, shown read-only at the same paths."""
    network: Literal["none", "session-only", "open"] = "none"
    """Network of commands: none; the model's endpoint alone; all that the node reaches."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 2 << 30
    """Memory of all processes together; a sandbox that uses more is ended."""
    processes: Annotated[int, Field(ge=4)] = 256
    """Number of processes and threads."""
    disk_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """Total size of written files, which lie in the node's memory."""
    files: Annotated[int, Field(ge=100)] = 100_000
    """Number of files, folders and links."""
    warm: Annotated[int, Field(ge=0)] = 4
    """Number of sandboxes that a cell keeps ready; mode `subproc` starts them when needed."""
    keep_files: tuple[Annotated[str, Field(pattern="^[^/]")], ...] = ()
    """Files in its working folder, such as `**/*.py`, to keep for `areal-hpc rejudge`."""


ISOLATION_VARIABLE = "AREAL_HPC_REWARD_ISOLATION"
"""Environment variable that passes `reward.isolation` to processes that compute rewards."""


class RewardConfig(BaseConfig):
    """Rewards that run programs of the model, third-party scorers, and gyms."""

    isolation: Literal["bwrap", "none"] = "bwrap"
    """Isolation of these; `none`: they can read and change all that you can."""
