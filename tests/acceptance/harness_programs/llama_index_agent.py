"""LlamaIndex over OpenAI's chat: its agent of functions, which streams, with one tool."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


async def main(task: str) -> None:
    model = OpenAILike(
        model="tiny",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )
    print(await FunctionAgent(tools=[run_command], llm=model).run(task))


asyncio.run(main(sys.argv[1]))
