"""Pydantic AI over chat, Responses or messages: one agent with one tool."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

MODELS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "messages": AnthropicModel}
dialect, task = sys.argv[1:]
agent = Agent(MODELS[dialect]("tiny"))


@agent.tool_plain
def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


print(agent.run_sync(task).output)
