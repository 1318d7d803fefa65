"""LiteLLM, over OpenAI's chat or Anthropic's messages: calls in a loop, each reply put back."""

import sys

import litellm

provider, task = sys.argv[1:]
tool = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
messages = [{"role": "user", "content": task}]
while True:
    said = litellm.completion(
        model=f"{provider}/tiny", messages=messages, tools=[tool], max_tokens=500
    )
    message = said.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    messages += [
        {"role": "tool", "tool_call_id": one.id, "content": "seventeen"}
        for one in message.tool_calls
    ]
