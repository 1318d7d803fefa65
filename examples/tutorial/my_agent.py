"""Everything of one's own: tasks, demonstrations, a reward, and the agent."""

import random

from openai import AsyncOpenAI


def tasks(size):
    """Tasks to greet guests."""
    for number in range(size):
        yield {"messages": [{"role": "user", "content": f"Greet guest {number % 100}."}]}


def demonstrations(size, seed):
    """Greetings to imitate, mostly sloppy ones: the small model has never seen a text."""
    rng = random.Random(seed)
    for task in tasks(size):
        (greeting,) = rng.choices(["hi", "hello", "good day"], weights=[6, 3, 1])
        yield {"messages": [*task["messages"], {"role": "assistant", "content": greeting}]}


def reward(reply):
    """Reward for manners."""
    return {"good day": 1.0, "hello": 0.3}.get(reply.strip(), 0.0)


class MyAgent:
    """Agent that asks once. It could as well search, run tools or ask a second model."""

    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        reply = await client.chat.completions.create(model="default", messages=data["messages"])
        return reward(reply.choices[0].message.content or "")
