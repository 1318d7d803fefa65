"""The quick start's agent: one model call, one verified answer."""

from typing import Any

from openai import AsyncOpenAI

from examples.quickstart.task import verify


class ArithmeticAgent:
    """Agent that asks once; the reward is 1 if the number after `Answer:` is right."""

    def __init__(self, max_tokens: int = 48) -> None:
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        completion = await client.chat.completions.create(
            model="default",
            messages=data["messages"],
            max_completion_tokens=self.max_tokens,
        )
        return float(verify(completion.choices[0].message.content or "", data))
