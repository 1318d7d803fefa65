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
    asked: Any = {"model": f"{provider}/tiny", "messages": messages, "tools": [tool]}
    said: Any = litellm.completion(**asked, max_tokens=500, stream=way == "stream")
    if way == "stream":
        said = litellm.stream_chunk_builder([*said], messages)
    message = said.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    messages += [
        {"role": "tool", "tool_call_id": one.id, "content": "seventeen"}
        for one in message.tool_calls
    ]
