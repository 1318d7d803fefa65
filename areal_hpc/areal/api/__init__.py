"""AReaL's `areal.api` package (re-exports)."""

from areal_hpc.rollout.agent import AgentWorkflow
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper
from areal_hpc.rollout.rollout_workflow import RolloutWorkflow

__all__ = ["AgentWorkflow", "AsyncRewardWrapper", "RolloutWorkflow"]
