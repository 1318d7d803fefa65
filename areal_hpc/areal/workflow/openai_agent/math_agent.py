"""AReaL's `areal.workflow.openai_agent.math_agent` (re-exports)."""

from areal_hpc.agents.openai_agents_sdk import AgentsSdkMathTeam as MathAgent
from areal_hpc.agents.openai_agents_sdk import build_math_agent, build_single_agent

__all__ = ["MathAgent", "build_math_agent", "build_single_agent"]
