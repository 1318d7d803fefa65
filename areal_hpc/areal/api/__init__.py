"""AReaL's `areal.api` package (re-exports)."""

from areal_hpc.rollout.agent import AgentWorkflow, RolloutWorkflow
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper

__all__ = ["AgentWorkflow", "AsyncRewardWrapper", "RolloutWorkflow"]
