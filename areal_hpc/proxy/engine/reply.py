"""Reply content independent of dialect: text, reasoning, tool calls."""

from __future__ import annotations

import secrets
from typing import Any

from msgspec import Struct, field

from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message


class ReplyToolCall(Struct):
    """A tool call, or the next part of one: then only the first part has id and name."""

    index: int
    name: str = ""
    arguments: str = ""
    """JSON as the model wrote it."""
    call_id: str = ""


class ReplyContent(Struct):
    """A reply, or the next part of one."""

    text: str = ""
    reasoning: str = ""
    calls: list[ReplyToolCall] = field(default_factory=list)

    def append_and_assign_call_ids(self, next_part: ReplyContent) -> None:
        """Append the next part. Calls that begin in it get their ids here."""
        self.text += next_part.text
        self.reasoning += next_part.reasoning
        for call in next_part.calls:
            if call.index >= len(self.calls):
                call.call_id = call.call_id or f"call_{secrets.token_hex(12)}"  # as OpenAI's
                self.calls.append(
                    ReplyToolCall(call.index, call.name, call.arguments, call.call_id)
                )
            else:
                whole = self.calls[call.index]
                whole.name = whole.name or call.name
                whole.arguments += call.arguments

    def build_assistant_message(self, prefill: str = "") -> Message:
        """The reply in normal form, as a client sends it back, with what the client began it by."""
        return normalize_chat_message(
            {
                "role": "assistant",
                "content": prefill + self.text,
                "reasoning_content": self.reasoning or None,
                "tool_calls": [
                    format_tool_call(call.call_id, call.name, call.arguments) for call in self.calls
                ],
            }
        )


def format_tool_call(call_id: str | None, function_name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": function_name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
