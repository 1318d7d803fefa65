"""Agents written with the OpenAI SDK: asynchronous, streaming, and blocking."""

import json
from typing import Any

from openai import AsyncOpenAI, OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2, 3]}, "y": {"enum": [1, 2, 3]}},
            "required": ["x", "y"],
            "additionalProperties": False,
        },
    },
}


class ToolAgent:
    """Agent that lets the model call `add`, as often as it likes, before it answers."""

    def __init__(self, max_turns: int = 4, **first_request: Any) -> None:
        self.max_turns = max_turns
        self.first_request = first_request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        text = await self.ask(client, list(data["messages"]))
        return 1.0 if data["answer"] in text else 0.0

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        request = self.first_request
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=[ADD], **request
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                result = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            request = {}
        return ""


class StreamingAgent(ToolAgent):
    """Agent that reads its answer as the model writes it."""

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        pieces = []
        stream = await client.chat.completions.create(
            model="default", messages=messages, stream=True, **self.first_request
        )
        async for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        return "".join(pieces)


class BlockingAgent:
    """Agent for `rollout.agent.mode: subproc`: the SDK finds the session in the environment."""

    async def run(self, data: dict[str, Any]) -> float:
        with OpenAI() as client:
            reply = client.chat.completions.create(model="default", messages=data["messages"])
        return 1.0 if data["answer"] in (reply.choices[0].message.content or "") else 0.0
