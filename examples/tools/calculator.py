"""Mathematics with a calculator: the model may call it before it answers."""

import json
from typing import Any

from openai import AsyncOpenAI

from areal_hpc.reward.countdown import evaluate_expression
from examples.mathematics.agents import MathAgent

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "strict": True,
        "description": "The exact worth of an expression of whole numbers, + - * / and ().",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": 40}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}


def calculate(arguments: str) -> str:
    """Evaluate a call for the model: the result, or the error of its call (models err)."""
    try:
        worth, _ = evaluate_expression(json.loads(arguments)["expression"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return "error: give an expression of whole numbers, + - * / and parentheses"
    except ZeroDivisionError:
        return "error: division by zero"
    return str(worth)


class CalculatorAgent(MathAgent):
    """Agent that runs the model's calls until it answers, or `max_turns` are over.

    `first_request` goes into the first model call alone, such as `tool_choice: required`.
    """

    def __init__(
        self, max_turns: int = 4, first_request: dict[str, Any] | None = None, **others: Any
    ) -> None:
        super().__init__(**others)
        self.max_turns = max_turns
        self.first_request = first_request or {}

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        request = {**self.request, **self.first_request}
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=[CALCULATE], **request
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            request = self.request
        return ""
