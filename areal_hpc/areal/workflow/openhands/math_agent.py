"""AReaL's `areal.workflow.openhands.math_agent` (re-exports)."""

from areal_hpc.agents.openhands_agent import OpenHandsMathAgent as MathAgent
from areal_hpc.agents.openhands_agent import OpenHandsTerminalAgent as MathToolAgent

__all__ = ["MathAgent", "MathToolAgent"]
