"""Agents of the OpenAI Agents SDK: one with a tool, and a team that hands over."""

from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

Digit = Literal[1, 2, 3]


@function_tool
def add(x: Digit, y: Digit) -> int:
    """Add two digits."""
    return x + y


class ToolAgent:
    """One agent and its tool."""

    def __init__(self, use_responses: bool = False, **settings: Any) -> None:
        self.use_responses = use_responses
        self.settings = ModelSettings(**settings)

    def build(self) -> Agent:
        return Agent(
            name="Calculator",
            instructions="You solve sums with your tool.",
            model="default",
            model_settings=self.settings,
            tools=[add],
        )

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        text = await self.ask(client, data["messages"][-1]["content"])
        return 1.0 if data["answer"] in text else 0.0

    async def ask(self, client: AsyncOpenAI, question: str) -> str:
        provider = OpenAIProvider(openai_client=client, use_responses=self.use_responses)
        result = await Runner.run(
            self.build(),
            input=question,
            run_config=RunConfig(model_provider=provider, tracing_disabled=True),
        )
        return str(result.final_output)


class TeamAgent(ToolAgent):
    """A coordinator hands over to a solver, which hands over to a checker."""

    def build(self) -> Agent:
        checker = Agent(
            name="Checker",
            instructions="You check solutions and state the final answer.",
            model="default",
        )
        solver = Agent(
            name="Solver",
            instructions="You solve the sum, then hand over to the checker.",
            model="default",
            model_settings=self.settings,
            handoffs=[checker],
        )
        return Agent(
            name="Coordinator",
            instructions="You hand sums over to the solver.",
            model="default",
            model_settings=self.settings,
            handoffs=[solver],
        )
