"""LangChain over Anthropic's messages: a bound tool, called in a loop."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool


@tool
def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


model = ChatAnthropic(model="tiny", max_tokens=500, max_retries=0).bind_tools([run_command])
messages = [HumanMessage(sys.argv[1])]
while True:
    said = model.invoke(messages)
    messages.append(said)
    if not said.tool_calls:
        print(said.text)
        break
    messages += [
        ToolMessage(run_command.invoke(one["args"]), tool_call_id=one["id"])
        for one in said.tool_calls
    ]
