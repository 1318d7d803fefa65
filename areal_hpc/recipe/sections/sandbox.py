"""Recipe sections `rollout.agent.sandbox` and `reward`: what isolates agents, and programs."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from areal_hpc.recipe.base import BaseConfig

SandboxRuntime = Literal["bwrap", "podman", "apptainer", "enroot"]
SANDBOX_RUNTIMES: tuple[str, ...] = get_args(SandboxRuntime)
AgentIsolation = Literal[SandboxRuntime, "none"]


class SandboxConfig(BaseConfig):
    """The sandbox that each episode's agent gets as `data["sandbox"]`."""

    root: str = ""
    """Folder, tar or OCI archive of a root file system, on every node; empty: the node's own."""
    readonly_folders: tuple[Annotated[str, Field(pattern="^/")], ...] = ()
    """More folders of the node that are shown, read-only, at their own places."""
    network: Literal["none", "session-only", "open"] = "none"
    """What commands reach: nothing; the model's endpoint alone; all that the node reaches."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 2 << 30
    """Memory of all processes together; a sandbox that takes more is ended."""
    processes: Annotated[int, Field(ge=4)] = 256
    """Processes and threads."""
    disk_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """All that is written, in memory of the node."""
    files: Annotated[int, Field(ge=100)] = 100_000
    """Files, folders and links that are made."""
    warm: Annotated[int, Field(ge=0)] = 4
    """Sandboxes that each cell keeps ready; those of mode `subproc` are started when wanted."""


ISOLATION_VARIABLE = "AREAL_HPC_REWARD_ISOLATION"
"""Environment variable that carries `reward.isolation` to the processes that reward."""


class RewardConfig(BaseConfig):
    """Rewards that run programs which the model wrote, others' scorers, gyms."""

    isolation: Literal["bwrap", "none"] = "bwrap"
    """How these are kept apart; `none`: they can read and change all that you can."""
