"""The frozen workload of `benchmarks.async`: conversations with a tool that takes its time."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from areal_hpc.rundir.jsonl import append_line

BLOCK = 128
"""Tasks whose tool times are the same set of quantiles, shuffled: any such block of the stream is
as long as any other, so that a run of a few steps and one of many can be compared."""
P99_OVER_P50 = 8.0


def tasks(size: int, seed: int, median_tool_s: float) -> Iterator[dict[str, Any]]:
    """Tasks whose tools take log-normal times, the 99th percentile 8 times the median.

    Args:
        size: How many; a multiple of `BLOCK`.
        seed: Of the order within the blocks.
        median_tool_s: Of the sum of an episode's tool calls.
    """
    normal, order = NormalDist(), random.Random(seed)
    sigma = np.log(P99_OVER_P50) / normal.inv_cdf(0.99)
    block = [
        median_tool_s * float(np.exp(sigma * normal.inv_cdf((i + 0.5) / BLOCK)))
        for i in range(BLOCK)
    ]
    for first in range(0, size, BLOCK):
        for number, tool_s in enumerate(order.sample(block, BLOCK), first):
            question = f"Task {number}: look it up."
            yield {"tool_s": tool_s, "messages": [{"role": "user", "content": question}]}


class ToolAgent:
    """Model call, tool, model call, tool...; notes when it began and ended."""

    def __init__(self, log: str, turns: int = 4, tokens_a_turn: int = 12) -> None:
        self._log = Path(log)
        self._turns = turns
        self._tokens_a_turn = tokens_a_turn

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        began, messages, reply = time.time(), [*data["messages"]], ""
        for _ in range(self._turns):
            completion = await client.chat.completions.create(
                model="default", messages=messages, max_completion_tokens=self._tokens_a_turn
            )
            reply = completion.choices[0].message.content or ""
            await asyncio.sleep(data["tool_s"] / self._turns)
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "The tool found nothing. Go on."},
            ]
        line = {"began": began, "ended": time.time(), "tool_s": data["tool_s"]}
        append_line(self._log, line)
        return float(len(reply) % 2)  # something to learn from, anything
