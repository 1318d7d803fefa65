"""AReaL's `areal.workflow.anthropic.math_agent` (re-exports)."""

from areal_hpc.agents.anthropic_agent import AnthropicMathAgent as MathAgent

__all__ = ["MathAgent"]
