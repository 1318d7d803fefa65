"""Typed configuration of the rollout driver."""

from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.sections.rollout import RolloutConfig, SamplingConfig
from areal_hpc.wire.ledger import TaskSplit


class DriverEvaluationSet(BaseConfig):
    """What a driver needs to know of an evaluation set."""

    number: Annotated[int, Field(ge=0)]
    """Its place, which its tickets' numbers tell."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    workflow: str = ""
    """Dotted path of the agent that plays it, if it is another one than in training."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    workflow_key: str = "evaluation"
    """Section of the recipe that names this agent."""


class RolloutJobConfig(ProcessConfig):
    """All a driver needs to know."""

    ENTRY = "areal_hpc.rollout.job:run"
    ROLE = "agents"
    KEYS_BY_PRIVATE_FIELD = MappingProxyType({"rollout.workflow_kwargs": "rollout.workflow_kwargs"})

    cell: str
    """The cell it drives: `cell-0`, `cell-1`, ..., or `evaluation`."""
    rollout: RolloutConfig
    evaluation_sets: dict[str, DriverEvaluationSet] = Field(default_factory=dict)
    """Sets of held-out tasks by name."""
    episode_slots: int
    splits: tuple[TaskSplit, ...] = ("train", "valid")
    """What it takes tickets of."""
    plays_trials: bool = False
    """Play `rollout.trial_tasks` before the first ticket is taken."""
    sys_path: tuple[str, ...] = ()
    """Folders from which the agent is imported."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Under Slurm: without a ledger and without an episode for so long, the cell goes."""

    def get_recipe_keys_by_private_field(self) -> dict[str, str]:
        """Those of every agent's arguments."""
        return super().get_recipe_keys_by_private_field() | {
            f"evaluation_sets.{name}.workflow_kwargs": f"{one.workflow_key}.workflow_kwargs"
            for name, one in self.evaluation_sets.items()
        }
