"""Calculator tool and answer reward shared by the ready agents."""

import json
from collections.abc import Mapping
from typing import Any

from areal_hpc.recipe.user_functions import import_by_path
from areal_hpc.reward.countdown import evaluate_expression
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper

DEFAULT_MATH_REWARD_PATH = "areal_hpc.reward.gsm8k.gsm8k_reward_fn"
CALCULATOR_DESCRIPTION = (
    "The exact value of an expression of whole numbers, + - * / and parentheses."
)
CALCULATOR_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string", "maxLength": 60}},
    "required": ["expression"],
    "additionalProperties": False,
}


def calculate(expression: str) -> str:
    """Return the text for the model: the value, or the fault of the expression."""
    try:
        value, _ = evaluate_expression(expression)
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, TypeError):
        return "error: give an expression of whole numbers, + - * / and parentheses"
    return str(value)


def call_calculator(arguments: str) -> str:
    """Answer a tool call of the model, whose arguments may be invalid JSON."""
    try:
        text = json.loads(arguments)["expression"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "error: give an expression"
    return calculate(text) if isinstance(text, str) else "error: give the expression as text"


class SubprocessRewardFunction:
    """Reward function of AReaL's signature, called in worker processes."""

    def __init__(self, reward_fn_path: str = DEFAULT_MATH_REWARD_PATH) -> None:
        self._reward = AsyncRewardWrapper(import_by_path(reward_fn_path))

    async def __call__(self, text: str, task: Mapping[str, Any]) -> float:
        """Return the reward of a reply; the function gets the task's keys beside `messages`."""
        arguments = {name: value for name, value in task.items() if name != "messages"}
        return await self._reward(task["messages"], text, None, None, **arguments)
