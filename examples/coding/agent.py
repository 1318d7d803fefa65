"""Programs: the model may see its own program run before the tests judge its last one.

For tasks with `messages` and `tests`: MBPP, HumanEval, APPS (`areal_hpc/dataset/adapters.py`).
"""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from areal_hpc.reward.answer_extraction import extract_code
from areal_hpc.reward.code import code_reward
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper
from areal_hpc.sandbox.program import run_program

MOST_SHOWN_CHARS = 1000


class CodeAgent:
    """Agent that writes a program, is shown its output or error, and writes a better one."""

    def __init__(self, max_turns: int = 2, **request: Any) -> None:
        self.max_turns = max_turns
        self.request = request
        self.reward = AsyncRewardWrapper(code_reward, timeout_seconds=120)

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
        text = ""
        for turn in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, **self.request
            )
            text = reply.choices[0].message.content or ""
            if turn + 1 < self.max_turns:
                seen = await asyncio.to_thread(tried, text)
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": seen},
                ]
        return text


def tried(text: str) -> str:
    """Run the model's program, and describe the outcome to it."""
    source = extract_code(text)
    if source is None:
        return "There is no ```python block in your reply. Write the program in one."
    outcome = run_program(source)
    shown = (outcome.stdout + outcome.stderr)[-MOST_SHOWN_CHARS:]
    return f"It ended with code {outcome.exit_code}:\n{shown}\nWrite the final program."
