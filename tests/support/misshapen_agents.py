"""Agents that no run can use: they are refused before anything starts."""

from typing import Any


class Blocking:
    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class NeedsArguments:
    def __init__(self, tokenizer: object) -> None:
        self.tokenizer = tokenizer

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class RaisesWhenBuilt:
    def __init__(self) -> None:
        settings: dict[str, str] = {}
        self.token = settings["TOOLS_TOKEN"]

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0
