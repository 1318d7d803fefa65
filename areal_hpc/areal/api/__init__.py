"""AReaL's `areal.api` package (re-exports)."""

from areal_hpc.areal.api.reward_api import AsyncRewardWrapper
from areal_hpc.areal.api.workflow_api import AgentWorkflow, RolloutWorkflow

__all__ = ["AgentWorkflow", "AsyncRewardWrapper", "RolloutWorkflow"]
