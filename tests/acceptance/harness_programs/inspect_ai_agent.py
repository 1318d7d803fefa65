"""inspect-ai over chat, Responses or messages: one sample, whose model must use a tool."""

import asyncio
import sys

from inspect_ai.model import ChatMessageUser, GenerateConfig, Model, get_model
from inspect_ai.tool import Tool, tool


@tool
def run_command() -> Tool:
    """The one tool."""

    async def execute(command: str) -> str:
        """Run a command.

        Args:
            command: For a shell.
        """
        return command.removeprefix("echo ")

    return execute


def choose_model(dialect: str) -> Model:
    config = GenerateConfig(max_retries=0)
    if dialect == "messages":
        return get_model("anthropic/tiny", config=config)
    return get_model("openai/tiny", config=config, responses_api=dialect == "responses")


async def main(dialect: str, task: str) -> None:
    messages = [ChatMessageUser(content=task)]
    _, output = await choose_model(dialect).generate_loop(messages, tools=[run_command()])
    print(output.completion, output.stop_reason)


asyncio.run(main(*sys.argv[1:]))
