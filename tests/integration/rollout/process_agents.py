"""Agents for processes of their own; they know of the session only what the environment says."""

import asyncio
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


class Blocking:
    """Calls without `await`; the task says what happens then."""

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward
        self.runs = 0

    async def run(self, data: dict[str, Any]) -> Any:
        self.runs += 1
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "m", "messages": data["messages"]}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
        match data.get("then"):
            case "hang":
                time.sleep(600)
            case "crash":
                os._exit(7)
            case "raise":
                raise ValueError("no idea")
            case "exit":
                sys.exit(2)
            case "environment":
                names = [name for name in os.environ if name.split("_")[0] in _SDKS]
                Path(data["note"]).write_text("\n".join(f"{n}={os.environ[n]}" for n in names))
            case "overlap":
                _write(data["note"], "begin")
                await asyncio.sleep(0.2)
                _write(data["note"], "end")
                return float(self.runs)
        return self.reward


_SDKS = ("OPENAI", "ANTHROPIC")


def _write(note: str, what: str) -> None:
    with Path(note).open("a") as file:
        file.write(f"{what}\n")


class WithSdk:
    """What the SDK finds in the environment is all it needs."""

    async def run(self, data: dict[str, Any]) -> dict[str, float]:
        from openai import OpenAI

        with OpenAI() as client:
            answer = client.chat.completions.create(model="m", messages=data["messages"])
        return {answer.id: 0.25}


class Unbuildable:
    def __init__(self) -> None:
        raise RuntimeError("no license")

    async def run(self, data: dict[str, Any]) -> float:
        return 1.0
