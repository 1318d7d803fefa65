"""AReaL's `areal.workflow.openai.math_agent` (re-exports)."""

from areal_hpc.agents.openai_agent import MultiTurnMathAgent
from areal_hpc.agents.openai_agent import OpenAIMathAgent as MathAgent
from areal_hpc.agents.openai_agent import OpenAIMathToolAgent as MathToolAgent

__all__ = ["MathAgent", "MathToolAgent", "MultiTurnMathAgent"]
