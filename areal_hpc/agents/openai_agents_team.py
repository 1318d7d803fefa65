"""Mathematics with the OpenAI Agents SDK: a team that hands over, or one agent."""

from __future__ import annotations

from typing import Any

from agents import Agent, handoff
from agents.extensions.handoff_prompt import RECOMMENDED_PROMPT_PREFIX

from areal_hpc.workflow.openai_agent.built import OpenAIAgentWorkflow

BUILD = f"{__name__}.build_math_agent"


def build_math_agent() -> Agent:
    """A coordinator that may hand over to an analyst, a solver or a verifier."""
    verifier = _member("Verifier", "You check a solution and state the final answer.")
    solver = _member("Solver", "You solve the problem step by step.", verifier)
    analyst = _member("Analyst", "You say what is given and what is asked.", solver)
    return _member("Coordinator", "You get a problem solved.", analyst, solver, verifier)


def build_single_agent(instructions: str = "You solve problems step by step.") -> Agent:
    """One agent without tools."""
    return Agent(name="Solver", instructions=instructions)


def _member(name: str, duty: str, *others: Agent) -> Agent:
    return Agent(
        name=name,
        instructions=f"{RECOMMENDED_PROMPT_PREFIX}\n{duty}",
        handoffs=[handoff(agent=other) for other in others],
    )


class MathAgent(OpenAIAgentWorkflow):
    """The team. Arguments: those of `OpenAIAgentWorkflow`."""

    def __init__(self, agent_builder_path: str = BUILD, **others: Any) -> None:
        super().__init__(agent_builder_path, **others)
