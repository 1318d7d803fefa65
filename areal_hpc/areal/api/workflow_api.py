"""What agents may derive from."""

from areal_hpc.rollout.agent import AgentWorkflow
from areal_hpc.rollout.workflow import RolloutWorkflow

__all__ = ["AgentWorkflow", "RolloutWorkflow"]
