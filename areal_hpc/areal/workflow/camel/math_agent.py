"""AReaL's `areal.workflow.camel.math_agent` (re-exports)."""

from areal_hpc.agents.camel_agent import CamelMathAgent as MathAgent

__all__ = ["MathAgent"]
