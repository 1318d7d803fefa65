"""Where jobs run and with which Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from areal_hpc.cluster.site import SlurmConfig
from areal_hpc.config import StageConfig


class EnvironmentConfig(StageConfig):
    """The Python of one role."""

    python: str = "auto"
    """A path; `auto` is `.venvs/<role>/bin/python` of this checkout, else the launcher's own."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of the role's processes."""


class ClusterConfig(StageConfig):
    """The machine room."""

    fileroot: Path
    """Shared storage; a run lives in `<fileroot>/<experiment_name>/<trial_name>`."""
    serve: EnvironmentConfig = EnvironmentConfig()
    """SGLang's environment."""
    train: EnvironmentConfig = EnvironmentConfig()
    """Megatron-core's environment."""
    agents: EnvironmentConfig = EnvironmentConfig()
    """The proxy's and the agent's environment."""
    gpu_memory_gib: Annotated[float | None, Field(gt=0)] = None
    """Memory of one GPU; `areal-hpc plan` warns of what will not fit."""
    stop_grace_s: Annotated[float, Field(ge=6)] = 12.0
    """Time a job gets to stop by itself before it is killed."""
    idle_timeout_s: Annotated[float, Field(ge=60)] = 1800.0
    """Under Slurm: a cell without trainer and episodes for so long gives its nodes back."""
    slurm: SlurmConfig = SlurmConfig()
    """How jobs are submitted; `areal-hpc run` ignores it."""
