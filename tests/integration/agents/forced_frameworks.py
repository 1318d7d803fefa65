"""Agents of the frameworks' environment, forced to call a tool, as a random model would not."""

from collections.abc import Awaitable, Callable
from typing import Any

from agents import Agent, ModelSettings
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import ToolMessage

from areal_hpc.agents.langchain_agent import LangGraphMathAgent
from areal_hpc.agents.openai_agents_sdk import build_math_agent
from examples.frameworks.langchain_agent import ToolAgent


class CallFirst(AgentMiddleware):  # type: ignore[misc]
    """Middleware that requires a call until a result; `strict` binds the arguments by grammar."""

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> Any:
        answered = any(isinstance(message, ToolMessage) for message in request.messages)
        request = request.override(
            tool_choice=None if answered else "any",
            model_settings={"strict": True, "parallel_tool_calls": False},
        )
        return await handler(request)


class ForcedAgent(ToolAgent):
    """Example agent whose model must call the tool before it answers."""

    def __init__(self) -> None:
        super().__init__([CallFirst()])


class ForcedCalculator(LangGraphMathAgent):
    """Ready agent whose model must call the calculator before it answers."""

    def __init__(self) -> None:
        super().__init__([CallFirst()])


def build_team() -> Agent:
    """Build the ready team, whose coordinator must hand over."""
    coordinator = build_math_agent()
    coordinator.model_settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    return coordinator
