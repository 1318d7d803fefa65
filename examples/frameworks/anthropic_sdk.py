"""Agents written with the Anthropic SDK: with a tool, and streaming."""

from typing import Any

from anthropic import AsyncAnthropic

ADD = {
    "name": "add",
    "description": "Add two digits.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"x": {"enum": [1, 2, 3]}, "y": {"enum": [1, 2, 3]}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
}


class ToolAgent:
    """Agent that lets the model call `add`, as often as it likes, before it answers."""

    def __init__(self, max_turns: int = 4, **first_request: Any) -> None:
        self.max_turns = max_turns
        self.first_request = first_request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        async with AsyncAnthropic(
            base_url=extra_kwargs["base_url"].removesuffix("/v1"),  # the SDK adds it
            api_key=extra_kwargs["api_key"],
        ) as client:
            text = await self.ask(client, list(data["messages"]))
        return 1.0 if data["answer"] in text else 0.0

    async def ask(self, client: AsyncAnthropic, messages: list[Any]) -> str:
        request = self.first_request
        for _ in range(self.max_turns):
            reply = await client.messages.create(
                model="default", max_tokens=200, messages=messages, tools=[ADD], **request
            )
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in reply.content if block.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": str(call.input["x"] + call.input["y"]),
                }
                for call in calls
            ]
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": results},
            ]
            request = {}
        return ""


class StreamingAgent(ToolAgent):
    """Agent that reads its answer as the model writes it."""

    async def ask(self, client: AsyncAnthropic, messages: list[Any]) -> str:
        async with client.messages.stream(
            model="default", max_tokens=60, messages=messages, system="You solve sums."
        ) as stream:
            return "".join([text async for text in stream.text_stream])
