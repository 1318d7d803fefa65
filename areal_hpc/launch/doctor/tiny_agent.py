"""Tasks and agent of the tiny run: a model with random weights can answer, and replies differ."""

from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI


class DistinctLettersAgent:
    """One call; the reward is the number of distinct characters of the reply."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        completion = await client.chat.completions.create(
            model="default", messages=data["messages"]
        )
        return float(len(set(completion.choices[0].message.content or "")))


def list_tasks(size: int) -> Iterator[dict[str, Any]]:
    for number in range(size):
        yield {"messages": [{"role": "user", "content": f"one two three {number}"}]}
