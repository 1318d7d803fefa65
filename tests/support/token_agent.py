"""An agent that takes a token, which nobody else may see."""

from typing import Any


class TokenAgent:
    def __init__(self, token: str) -> None:
        self.token = token

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 0.0
