"""inspect-ai over OpenAI's Responses: one sample, whose model must use a tool."""

import asyncio
import sys

from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
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


async def main(task: str) -> None:
    """Let the model call the tool until it says what it has found."""
    model = get_model("openai/tiny", config=GenerateConfig(max_retries=0), responses_api=True)
    _, output = await model.generate_loop([ChatMessageUser(content=task)], tools=[run_command()])
    print(output.completion, output.stop_reason)


asyncio.run(main(sys.argv[1]))
