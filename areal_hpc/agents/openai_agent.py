"""Math agents with the OpenAI SDK: one call, several tries, or a calculator.

Tasks have `messages` and the arguments of their reward function, such as `answer`. In mode
`subproc` the SDK reads the session's URL and key from the environment.
"""

from typing import Any

from openai import AsyncOpenAI

from areal_hpc.agents.math_tools import (
    CALCULATOR_DESCRIPTION,
    CALCULATOR_PARAMETERS,
    DEFAULT_MATH_REWARD_PATH,
    SubprocessRewardFunction,
    call_calculator,
)

CALCULATOR_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": CALCULATOR_DESCRIPTION,
        "strict": True,
        "parameters": CALCULATOR_PARAMETERS,
    },
}
RETRY_PROMPT = "That is not right. Look for the mistake, and answer again in the same form."


class OpenAIMathAgent:
    """Agent of one model call. `request` has its further arguments, such as `temperature`."""

    def __init__(self, reward_fn_path: str = DEFAULT_MATH_REWARD_PATH, **request: Any) -> None:
        self.reward = SubprocessRewardFunction(reward_fn_path)
        self.request = request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        text = await self.ask(make_client(extra_kwargs), list(data["messages"]))
        return await self.reward(text, data)

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        reply = await client.chat.completions.create(
            model="default", messages=messages, **self.request
        )
        return reply.choices[0].message.content or ""


class MultiTurnMathAgent(OpenAIMathAgent):
    """Agent that tries again after a wrong answer, `max_turns` times in all.

    The last reply has the reward; `trainer.objective.credit` propagates it to earlier replies.
    """

    def __init__(self, max_turns: int = 8, **base_options: Any) -> None:
        super().__init__(**base_options)
        self.max_turns = max_turns

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | dict[str, float]:
        """Play one episode, and return the reward by the id of the last reply."""
        client, messages = make_client(extra_kwargs), list(data["messages"])
        rewards: dict[str, float] = {}
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, **self.request
            )
            message = reply.choices[0].message
            rewards = {reply.id: await self.reward(message.content or "", data)}
            if rewards[reply.id] > 0:
                break
            messages += [message, {"role": "user", "content": RETRY_PROMPT}]
        return rewards


class OpenAIMathToolAgent(OpenAIMathAgent):
    """Agent with a calculator; its answer is empty if `max_turns` calls bring none.

    `first_request` has arguments of the first model call alone, such as `tool_choice`.
    """

    def __init__(
        self, max_turns: int = 8, first_request: dict[str, Any] | None = None, **base_options: Any
    ) -> None:
        super().__init__(**base_options)
        self.max_turns = max_turns
        self.first_request = first_request or {}

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        request = {**self.request, **self.first_request}
        for _ in range(self.max_turns):
            reply: Any = await client.chat.completions.create(
                model="default", messages=messages, tools=[CALCULATOR_TOOL], **request
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                result = call_calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            request = self.request
        return ""


def make_client(extra_kwargs: dict[str, Any]) -> AsyncOpenAI:
    """Make the SDK's client for an episode; missing arguments come from the environment."""
    return AsyncOpenAI(
        base_url=extra_kwargs.get("base_url"),
        api_key=extra_kwargs.get("api_key"),
        http_client=extra_kwargs.get("http_client"),
        max_retries=0,
    )
