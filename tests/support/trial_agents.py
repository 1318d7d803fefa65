"""Agents for `areal-hpc try` that work."""

import time
from typing import Any


class ChatAgent:
    """One model call; the reward is 1."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await self.ask(data, extra_kwargs)
        return 1.0

    async def ask(self, data: dict[str, Any], session: dict[str, Any], **asked: Any) -> str:
        """The model's reply."""
        reply = await session["http_client"].post(
            f"{session['base_url']}/chat/completions",
            headers={"authorization": f"Bearer {session['api_key']}"},
            json={"model": "default", "messages": data["messages"], **asked},
        )
        if reply.status_code != 200:
            raise RuntimeError(reply.text)
        message = reply.json()["choices"][0]["message"]
        return str(message["content"])


class TwoTurnAgent(ChatAgent):
    """Two turns of one conversation, the first of them streamed; blocks its event loop between."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        said = await self.ask(data, extra_kwargs)
        time.sleep(0.2)
        print(*(f"line {number}" for number in range(9)), sep="\n")
        turns = [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
        await self.ask({"messages": [*data["messages"], *turns]}, extra_kwargs)
        return 0.5


class GreedyAgent(ChatAgent):
    """One call at temperature 0."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await self.ask(data, extra_kwargs, temperature=0, max_tokens=4)
        return 1.0


class ProcessAgent:
    """For mode `subproc`: a program that finds its session in the environment."""

    async def run(self, data: dict[str, Any]) -> float:
        import json
        import os
        import urllib.request

        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "default", "messages": data["messages"]}).encode(),
            {
                "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
                "content-type": "application/json",
            },
        )
        with urllib.request.urlopen(request) as reply:
            json.load(reply)
        return 2.0
