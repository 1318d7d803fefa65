"""AReaL's `areal.workflow.langchain.math_agent` (re-exports)."""

from areal_hpc.agents.langchain_agent import LangChainMathAgent as MathAgent
from areal_hpc.agents.langchain_agent import LangGraphMathAgent as MathToolAgent

__all__ = ["MathAgent", "MathToolAgent"]
