"""Anthropic's SDK for Python, streamed by its helper: tool uses in a loop."""

import sys
from typing import Any

from anthropic import Anthropic

client = Anthropic(max_retries=0)
schema = {"type": "object", "properties": {"command": {"type": "string"}}}
tools: Any = [
    {"name": "run_command", "description": "Run a command.", "input_schema": schema},
]
messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
while True:
    request: Any = {"model": "tiny", "max_tokens": 500, "messages": messages, "tools": tools}
    with client.messages.stream(**request) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    uses = [block for block in message.content if block.type == "tool_use"]
    if not uses:
        print("".join(block.text for block in message.content if block.type == "text"))
        break
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "seventeen"} for use in uses
    ]
    messages.append({"role": "user", "content": results})
