"""Agents for processes of their own; they know of the session only what the environment says."""

import asyncio
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from areal_hpc import Reward


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


class Graded:
    """Says what its reward was made of."""

    async def run(self, data: dict[str, Any]) -> Reward:
        from openai import OpenAI

        with OpenAI() as client:
            reply = client.chat.completions.create(model="default", messages=data["messages"])
        text = reply.choices[0].message.content or ""
        parts = {"correct": 0.8 * (data["answer"] in text), "format": 0.2 * ("Answer:" in text)}
        return Reward(
            sum(parts.values()),
            parts=parts,
            metrics={"reply_characters": len(text)},
            note="no answer" if "Answer:" not in text else "",
        )


class Misgraded:
    """Makes a reward of what is no number."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Reward:
        return Reward(1.0, parts={"correct": data["answer"]})
