"""The quick start's tasks and agent without reasoning-gym and the OpenAI SDK.

Three processes of every run would import them, four seconds each.
"""

import random
from collections.abc import Iterator
from typing import Any


def tasks(size: int, seed: int, terms: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for _ in range(size):
        numbers = [rng.randrange(10) for _ in range(terms)]
        question = f"State the final answer to the following: {' + '.join(map(str, numbers))} ="
        message = {"role": "user", "content": question}
        yield {"messages": [message], "answer": str(sum(numbers))}


def is_right(text: str, task: dict[str, Any]) -> bool:
    """Check that the number after the last `Answer:` is the sum."""
    answer: str = task["answer"]
    return text.rpartition("Answer:")[2].strip() == answer


class SumAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        reply = await extra_kwargs["http_client"].post(
            f"{extra_kwargs['base_url']}/chat/completions",
            headers={"authorization": f"Bearer {extra_kwargs['api_key']}"},
            json={"model": "default", "messages": data["messages"], "max_completion_tokens": 48},
        )
        message = reply.raise_for_status().json()["choices"][0]["message"]
        return float(is_right(message["content"] or "", data))
