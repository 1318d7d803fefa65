"""Math agents with LangChain, and with LangGraph and a calculator."""

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from areal_hpc.agents.math_tools import (
    CALCULATOR_DESCRIPTION,
    DEFAULT_MATH_REWARD_PATH,
    SubprocessRewardFunction,
    calculate,
)


class CalculatorInput(BaseModel):
    expression: str = Field(max_length=60)


CALCULATOR_TOOL = StructuredTool.from_function(
    calculate, description=CALCULATOR_DESCRIPTION, args_schema=CalculatorInput
)


class LangChainMathAgent:
    """Agent of one model call. `model` has further arguments of `ChatOpenAI`."""

    def __init__(self, reward_fn_path: str = DEFAULT_MATH_REWARD_PATH, **model: Any) -> None:
        self.reward = SubprocessRewardFunction(reward_fn_path)
        self.model = model

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        model = ChatOpenAI(
            model="default",
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            max_retries=0,
            **self.model,
        )
        text = await self.ask(model, list(data["messages"]))
        return await self.reward(text, data)

    async def ask(self, model: Any, messages: list[Any]) -> str:
        return str((await model.ainvoke(messages)).text)


class LangGraphMathAgent(LangChainMathAgent):
    """Agent with a calculator; `middleware` is that of LangChain's agent."""

    def __init__(self, middleware: Sequence[Any] = (), **base_options: Any) -> None:
        super().__init__(**base_options)
        self.middleware = middleware

    async def ask(self, model: Any, messages: list[Any]) -> str:
        graph = create_agent(model, tools=[CALCULATOR_TOOL], middleware=self.middleware)
        state = await graph.ainvoke({"messages": messages})
        return str(state["messages"][-1].text)
