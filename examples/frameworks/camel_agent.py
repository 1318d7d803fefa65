"""A CAMEL ChatAgent with a tool."""

from typing import Any, Literal

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType

from areal_hpc.client.camel import SessionTokenCounter

Digit = Literal[1, 2, 3]


def add(x: Digit, y: Digit) -> int:
    """Add two digits.

    Args:
        x: The first digit.
        y: The second digit.
    """
    return x + y


class ToolAgent:
    """Agent that calls its tool until the model answers.

    CAMEL counts tokens, and for a model it does not know it would download OpenAI's tokenizer:
    `tokenizer` is the directory of the model.
    """

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="default",
            url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            token_counter=SessionTokenCounter(self.tokenizer),
        )
        text = await self.ask(model, data["messages"][-1]["content"])
        return 1.0 if data["answer"] in text else 0.0

    async def ask(self, model: Any, question: str) -> str:
        agent = ChatAgent("You solve sums with your tool.", model, tools=[FunctionTool(add)])
        response = await agent.astep(question)
        return response.msg.content
