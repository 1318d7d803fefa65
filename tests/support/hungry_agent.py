"""The quick start's agent, that eats all memory of its cell when it finds something to eat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.slow_agent import SlowAgent

BITE_BYTES = 64 * 1024**2
MOST_BITES = 96
"""6 GiB: a host that holds nobody to a limit survives this."""


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
