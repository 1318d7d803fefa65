"""LangChain over chat, Responses or messages, streamed or whole: a bound tool, called in a loop."""

import functools
import operator
import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


def choose_model(dialect: str) -> Any:
    if dialect == "messages":
        return ChatAnthropic(model="tiny", max_tokens=500, max_retries=0)
    return ChatOpenAI(model="tiny", max_retries=0, use_responses_api=dialect == "responses")


dialect, way, task = sys.argv[1:]
model = choose_model(dialect).bind_tools([run_command])
messages: list[Any] = [HumanMessage(task)]
while True:
    if way == "stream":
        message = functools.reduce(operator.add, model.stream(messages))
    else:
        message = model.invoke(messages)
    messages.append(message)
    if not message.tool_calls:
        print(message.text)
        break
    messages += [
        ToolMessage(run_command.invoke(call["args"]), tool_call_id=call["id"])
        for call in message.tool_calls
    ]
