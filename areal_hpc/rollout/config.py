"""Typed configuration of the rollout driver."""

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.recipe.sections.rollout import RolloutConfig, SamplingConfig
from areal_hpc.wire.ledger import TaskSplit


class RolloutJobConfig(ProcessConfig):
    """All a driver needs to know."""

    ENTRY = "areal_hpc.rollout.job:run"
    ROLE = "agents"
    KEYS_BY_PRIVATE_FIELD = MappingProxyType(
        {
            "rollout.workflow_kwargs": "rollout.workflow_kwargs",
            "evaluation_workflow_kwargs": "evaluation.workflow_kwargs",
        }
    )

    cell: str
    """The cell it drives: `cell-0`, `cell-1`, ..., or `evaluation`."""
    rollout: RolloutConfig
    evaluation_sampling: SamplingConfig
    evaluation_workflow: str = ""
    """Dotted path of the agent that plays them, if it is another one."""
    evaluation_workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    episode_slots: int
    splits: tuple[TaskSplit, ...] = ("train", "valid")
    """What it takes tickets of."""
    plays_trials: bool = False
    """Play `rollout.trial_tasks` before the first ticket is taken."""
    sys_path: tuple[str, ...] = ()
    """Folders from which the agent is imported."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Under Slurm: without a ledger and without an episode for so long, the cell goes."""
