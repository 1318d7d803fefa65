"""The ready team, whose coordinator must hand over: a random model would not."""

from __future__ import annotations

from agents import Agent, ModelSettings

from areal_hpc.agents.openai_agents_sdk import build_math_agent


def build() -> Agent:
    coordinator = build_math_agent()
    coordinator.model_settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    return coordinator
