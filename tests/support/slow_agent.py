"""The quick start's agent, that lingers: a run of it lasts as long as a soak test must."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from examples.quickstart.agent import ArithmeticAgent


class SlowAgent(ArithmeticAgent):
    """Waits before it asks, now and then for long."""

    def __init__(self, mean_pause_s: float) -> None:
        super().__init__()
        self._mean_pause_s = mean_pause_s

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await asyncio.sleep(random.expovariate(1.0 / self._mean_pause_s))
        return await super().run(data, **extra_kwargs)
