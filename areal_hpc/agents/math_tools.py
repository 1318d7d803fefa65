"""The tool of the ready agents that have one."""

from __future__ import annotations

import json
from typing import Any

from areal_hpc.reward.countdown import evaluate

DESCRIPTION = "The exact value of an expression of whole numbers, + - * / and parentheses."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string", "maxLength": 60}},
    "required": ["expression"],
    "additionalProperties": False,
}


def calculate(expression: str) -> str:
    """What the model is told: the value, or what is wrong with the expression."""
    try:
        value, _ = evaluate(expression)
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, TypeError):
        return "error: give an expression of whole numbers, + - * / and parentheses"
    return str(value)


def answered(arguments: str) -> str:
    """The same for a call's arguments as the model wrote them, which need not be what they should.

    Args:
        arguments: JSON, if the model wrote any.
    """
    try:
        given = json.loads(arguments)["expression"]
    except (ValueError, TypeError, KeyError):
        return "error: give an expression"
    return calculate(given)
