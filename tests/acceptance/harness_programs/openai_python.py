"""OpenAI's SDK for Python over chat or Responses, streamed by its helper: calls in a loop."""

import sys
from typing import Any

from openai import OpenAI

client = OpenAI(max_retries=0)
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
run_command = {"name": "run_command", "description": "Run a command.", "parameters": parameters}


def chat(messages: list[Any]) -> str:
    tools: Any = [{"type": "function", "function": run_command}]
    while True:
        request: Any = {"model": "tiny", "messages": messages, "tools": tools}
        with client.chat.completions.stream(**request) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return message.content or ""
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "seventeen"}
            for call in message.tool_calls
        ]


def respond(items: list[Any]) -> str:
    tools: Any = [{"type": "function", "strict": False, **run_command}]
    while True:
        with client.responses.stream(model="tiny", input=items, tools=tools) as stream:
            response = stream.get_final_response()
        items += [item.to_dict() for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "seventeen"}
            for call in calls
        ]


dialect, task = sys.argv[1:]
ask = {"chat": chat, "responses": respond}[dialect]
print(ask([{"role": "user", "content": task}]))
