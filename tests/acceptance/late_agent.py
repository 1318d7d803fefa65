"""The quick start's agent, whose answers are judged late: their tokens are old when trained."""

from __future__ import annotations

import asyncio
from typing import Any

from examples.quickstart.agent import ArithmeticAgent


class LateAgent(ArithmeticAgent):
    """Waits between the model's reply and its reward, as behind a slow tool."""

    def __init__(self, judged_after_s: float) -> None:
        super().__init__()
        self._judged_after_s = judged_after_s

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        reward = await super().run(data, **extra_kwargs)
        await asyncio.sleep(self._judged_after_s)
        return reward
