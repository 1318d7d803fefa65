"""The quick start's agent, that lingers, has its answers judged late, or eats all memory."""

import asyncio
import random
from pathlib import Path
from typing import Any

from examples.quickstart.agent import ArithmeticAgent

BITE_BYTES = 64 * 1024**2
MOST_BITES = 96
"""6 GiB: a host that holds nobody to a limit survives this."""


class SlowAgent(ArithmeticAgent):
    """Waits before it asks, now and then for long: a run of it lasts as long as a test must."""

    def __init__(self, mean_pause_s: float) -> None:
        super().__init__()
        self._mean_pause_s = mean_pause_s

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await asyncio.sleep(random.expovariate(1.0 / self._mean_pause_s))
        return await super().run(data, **extra_kwargs)


class LateAgent(ArithmeticAgent):
    """Waits between reply and reward, as behind a slow tool: its tokens are old when trained."""

    def __init__(self, judged_after_s: float) -> None:
        super().__init__()
        self._judged_after_s = judged_after_s

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        reward = await super().run(data, **extra_kwargs)
        await asyncio.sleep(self._judged_after_s)
        return reward


class HungryAgent(SlowAgent):
    """Answers, slowly; the episode that can remove the file `food` allocates until it is killed."""

    def __init__(self, mean_pause_s: float, food: str) -> None:
        super().__init__(mean_pause_s)
        self._food = Path(food)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        try:
            self._food.unlink()
        except FileNotFoundError:
            return await super().run(data, **extra_kwargs)
        eaten = [b"x" * BITE_BYTES for _ in range(MOST_BITES)]
        raise MemoryError(f"nobody stopped an agent that took {len(eaten) * BITE_BYTES} bytes")
