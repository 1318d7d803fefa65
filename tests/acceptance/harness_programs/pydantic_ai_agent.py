"""Pydantic AI over chat, Responses or messages, streamed or whole: one agent with one tool."""

import sys
from collections.abc import AsyncIterable

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
dialect, way, task = sys.argv[1:]
agent = Agent(MODELS[dialect]("tiny"))


@agent.tool_plain
def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


async def read_events(context: object, events: AsyncIterable[object]) -> None:
    """Ignore the streamed events."""
    async for _ in events:
        pass


handler = read_events if way == "stream" else None
print(agent.run_sync(task, event_stream_handler=handler).output)
