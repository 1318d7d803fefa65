"""Agents for tasks with `messages` and `answer`: GSM8K, MATH, AIME, reasoning-gym.

Any reward function of AReaL's signature will do; it runs in processes of its own.
"""

from typing import Any

from openai import AsyncOpenAI

from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper

MATH = "areal_hpc.reward.math:math_reward"
AGAIN = "That is not right. Look for the mistake, and answer again in the same form."


class MathAgent:
    """Agent that asks once. `request` goes into the model call, such as `temperature: 0.7`."""

    def __init__(self, reward: str = MATH, **request: Any) -> None:
        self.reward = AsyncRewardWrapper(load_user_function(reward, "rollout.workflow_kwargs"))
        self.request = request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        messages = data.pop("messages")
        text = await self.ask(client, messages)
        return await self.reward(messages, text, [], [], **data)

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        reply = await client.chat.completions.create(
            model="default", messages=messages, **self.request
        )
        return reply.choices[0].message.content or ""


class MultiTurnMathAgent(MathAgent):
    """Agent that tries again after a wrong answer; later successes are worth less.

    With `trainer.objective.credit=turn` and a `turn_discount` the early turns of a success share in
    it less, too.
    """

    def __init__(self, max_turns: int = 3, decay: float = 0.9, **others: Any) -> None:
        super().__init__(**others)
        self.max_turns = max_turns
        self.decay = decay

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        messages = data.pop("messages")
        for turn in range(self.max_turns):
            text = await self.ask(client, messages)
            reward = await self.reward(messages, text, [], [], **data)
            if reward > 0:
                return reward * self.decay**turn
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": AGAIN},
            ]
        return 0.0
