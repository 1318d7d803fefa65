"""Agents with the mistakes that users make; no run can use the last one."""

import asyncio
import time
from typing import Any

from openai import AsyncOpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def ask(data: dict[str, Any], extra_kwargs: dict[str, Any], **request: Any) -> str:
    """Make one model call through the SDK; return the model's reply."""
    client = AsyncOpenAI(
        base_url=request.pop("base_url", extra_kwargs["base_url"]),
        api_key=extra_kwargs["api_key"],
        http_client=extra_kwargs["http_client"],
    )
    reply = await client.chat.completions.create(
        model="default", messages=data["messages"], max_completion_tokens=8, **request
    )
    return reply.choices[0].message.content or ""


class RaisesKeyError:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        said = await ask(data, extra_kwargs)
        return float(said == data["anwser"])


class ReadsMissingColumn:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        data["messages"] = [{"role": "user", "content": data["question"]}]
        return float(len(await ask(data, extra_kwargs)))


class ReturnsString:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        await ask(data, extra_kwargs)
        return "1.0"


class MakesNoCall:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class AsksForTools:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return float(len(await ask(data, extra_kwargs, tools=[TOOL])))


class CallsFixedAddress:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return float(len(await ask(data, extra_kwargs, base_url="http://127.0.0.1:9/v1")))


class Hangs:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(data, extra_kwargs)
        await asyncio.Event().wait()
        return 1.0


class BlocksLoop:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await ask(data, extra_kwargs)
        time.sleep(5.0)
        return 1.0


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


class TakesToken:
    """Agent whose argument is a secret token."""

    def __init__(self, token: str) -> None:
        self.token = token

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 0.0
