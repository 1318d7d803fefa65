"""LiteLLM over OpenAI's chat or Anthropic's messages, streamed or whole: calls in a loop."""

import sys
from typing import Any

import litellm

provider, way, task = sys.argv[1:]
tool = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
messages: list[Any] = [{"role": "user", "content": task}]
while True:
    request: Any = {"model": f"{provider}/tiny", "messages": messages, "tools": [tool]}
    response: Any = litellm.completion(**request, max_tokens=500, stream=way == "stream")
    if way == "stream":
        response = litellm.stream_chunk_builder([*response], messages)
    message = response.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "seventeen"}
        for call in message.tool_calls
    ]
