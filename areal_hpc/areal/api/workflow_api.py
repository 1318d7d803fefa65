"""AReaL's `areal.api.workflow_api` (re-exports)."""

from areal_hpc.rollout.agent import AgentWorkflow
from areal_hpc.rollout.rollout_workflow import RolloutWorkflow

__all__ = ["AgentWorkflow", "RolloutWorkflow"]
