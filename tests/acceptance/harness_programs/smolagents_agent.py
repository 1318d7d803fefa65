"""smolagents over OpenAI's chat: its agent that calls tools, streamed or whole, or writes code."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def run_command(command: str) -> str:
    """Run a command.

    Args:
        command: For a shell.
    """
    return command.removeprefix("echo ")


form, task = sys.argv[1:]
model = OpenAIServerModel(
    "tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = CodeAgent if form == "code" else ToolCallingAgent
print(agent([run_command], model, stream_outputs=form == "stream", max_steps=5).run(task))
