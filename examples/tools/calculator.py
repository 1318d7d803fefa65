"""Mathematics with a calculator: the model may call it before it answers."""

import json
from typing import Any

from openai import AsyncOpenAI

from areal_hpc.reward.countdown import NotAnExpression, evaluate
from examples.math.agents import MathAgent

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The exact worth of an expression of whole numbers, + - * / and ().",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": 40}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}


def calculate(expression: str) -> str:
    """What the model is told: the result, or what is wrong with the expression."""
    try:
        worth, _ = evaluate(expression)
    except NotAnExpression:
        return "error: use whole numbers, + - * / and parentheses"
    except ZeroDivisionError:
        return "error: division by zero"
    return str(worth)


class CalculatorAgent(MathAgent):
    """Runs the calls that the model makes until it answers, or `max_turns` are over."""

    def __init__(self, max_turns: int = 4, **others: Any) -> None:
        super().__init__(**others)
        self.max_turns = max_turns

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=[CALCULATE], **self.request
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                result = calculate(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ""
