"""A LangChain agent, which is a LangGraph graph of a model and its tools."""

from collections.abc import Sequence
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

Digit = Literal[1, 2, 3]


@tool
def add(x: Digit, y: Digit) -> int:
    """Add two digits."""
    return x + y


class ToolAgent:
    """Calls its tool until the model answers."""

    def __init__(self, middleware: Sequence[AgentMiddleware] = ()) -> None:
        self.middleware = middleware

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        model = ChatOpenAI(
            model="default",
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
        )
        text = await self.ask(model, data["messages"])
        return 1.0 if data["answer"] in text else 0.0

    async def ask(self, model: ChatOpenAI, messages: list[dict[str, Any]]) -> str:
        graph = create_agent(model, tools=[add], middleware=self.middleware)
        state = await graph.ainvoke({"messages": messages})
        return str(state["messages"][-1].text)
