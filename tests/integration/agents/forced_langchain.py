"""The example, made to call its tool first: a random model would not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import ToolMessage

from examples.frameworks.langchain_agent import ToolAgent


class CallFirst(AgentMiddleware):  # type: ignore[misc]
    """Requires a call until there is a result; `strict` lets the grammar hold its arguments."""

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
    """Its model must call the tool before it answers."""

    def __init__(self) -> None:
        super().__init__([CallFirst()])
