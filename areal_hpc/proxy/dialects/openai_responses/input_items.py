"""OpenAI Responses input items as chat messages.

The items of one reply (reasoning, a message, calls) come back one by one; together they are one
message of the assistant, as it was when the model said it.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec
from msgspec import Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.custom_tools import encode_custom_input
from areal_hpc.proxy.dialects.openai.chat_request import ToolCall, read_call
from areal_hpc.proxy.dialects.openai_responses.output_items import find_item_in_replies
from areal_hpc.proxy.dialects.openai_responses.tools import qualify_tool_name
from areal_hpc.proxy.dialects.validation import format_left_out_part
from areal_hpc.proxy.engine.model_call import format_tool_call
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.session.tree import InteractionTree


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct):
    """One item of `input`; which fields it must have depends on its type.

    What SDKs add when they hand an item back (`status`, `annotations`, ...) makes no difference.
    """

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer", "tool"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    """JSON as text; an object where a client has read it."""
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    """This and the next: of a message in the form of Chat Completions."""
    tool_call_id: str | None = None

    @property
    def is_reference(self) -> bool:
        is_bare = self.type == "message" and self.role is None and self.content is None
        return self.id is not None and (self.type == "item_reference" or is_bare)


_REQUIRED_FIELDS_BY_TYPE = {
    "message": ("role",),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
}
_HOSTED_ITEM_TYPE_PATTERNS = (
    *("*_call", "*_call_output", "mcp_*", "tool_search*", "*compaction*", "program*"),
)
"""Items of tools that a provider's servers run, and of histories that those compacted."""
_IMAGE_PART_TYPES = ("input_image", "image_url", "input_file")
_TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def resolve_references(items: Sequence[InputItem], tree: InteractionTree) -> list[InputItem]:
    """Replace references by the items that they name."""
    resolved = []
    for i, item in enumerate(items):
        if item.is_reference and item.id is not None:
            found = find_item_in_replies(tree, item.id)
            if found is None:
                problem = f"this session has said no item {item.id!r:.300}"
                hint = "send the item itself"
                raise ProxyRequestError(400, problem, key=f"input[{i}].id", hint=hint)
            item = msgspec.convert(found, InputItem)
        resolved.append(item)
    return resolved


def build_messages(items: Sequence[InputItem], ignored: list[str]) -> Iterator[Message]:
    """The messages that items stand for, in normal form.

    Those of hosted tools are left out, and their types are added to `ignored`.
    """
    reply: dict[str, Any] = {}
    for i, item in enumerate(items):
        if _is_hosted(item):
            if (name := f"input[{item.type}]") not in ignored:
                ignored.append(name)
            continue
        _require_supported_complete_item(item, i)
        said = _read_assistant_fields(item, i)
        if said is None or not _continues_assistant_message(reply, said):
            if reply:
                yield _build_assistant_message(reply)
            reply = {}
        if said is None:
            yield normalize_chat_message(_build_non_assistant_message(item, i))
        else:
            calls = [*reply.get("tool_calls", ()), *said.pop("tool_calls", ())]
            reply |= said
            if calls:
                reply["tool_calls"] = calls
    if reply:
        yield _build_assistant_message(reply)


def _build_assistant_message(reply: dict[str, Any]) -> Message:
    return normalize_chat_message({"role": "assistant", **reply})


def _continues_assistant_message(reply: dict[str, Any], item_message: dict[str, Any]) -> bool:
    if "reasoning_content" in item_message:
        return not reply
    return "tool_calls" in item_message or "content" not in reply


def _is_hosted(item: InputItem) -> bool:
    return item.type not in _REQUIRED_FIELDS_BY_TYPE and any(
        fnmatchcase(item.type, one) for one in _HOSTED_ITEM_TYPE_PATTERNS
    )


def _require_supported_complete_item(item: InputItem, i: int) -> None:
    needed = _REQUIRED_FIELDS_BY_TYPE.get(item.type)
    if needed is None:
        problem = f"items of type {item.type!r} are not supported"
        raise ProxyRequestError(400, problem, key=f"input[{i}].type")
    is_chat_call = item.role == "assistant" and item.tool_calls
    if item.type == "message" and item.content is None and not is_chat_call:
        needed = (*needed, "content")
    for name in needed:
        if getattr(item, name) is None:
            problem = f"an item of type {item.type!r} needs {name}"
            raise ProxyRequestError(400, problem, key=f"input[{i}].{name}")


def _read_assistant_fields(item: InputItem, i: int) -> dict[str, Any] | None:
    if item.type == "reasoning":
        parts = item.content or item.summary or []
        return {"reasoning_content": _join_texts(parts, f"input[{i}].content") or None}
    if item.type == "function_call":
        name = qualify_tool_name(item.namespace, item.name or "")
        return {"tool_calls": [format_tool_call(item.call_id, name, item.arguments)]}
    if item.type == "custom_tool_call":
        arguments = encode_custom_input(item.input or "")
        return {"tool_calls": [format_tool_call(item.call_id, item.name or "", arguments)]}
    if item.type == "message" and item.role == "assistant":
        text = _join_texts(item.content or "", f"input[{i}].content", separator="")
        calls = [
            {"id": one.id, "function": read_call(one, f"input[{i}].tool_calls[{j}]")}
            for j, one in enumerate(item.tool_calls or ())
        ]
        return {"content": text} | ({"tool_calls": calls} if calls else {})
    return None


def _build_non_assistant_message(item: InputItem, i: int) -> Message:
    if item.type in ("function_call_output", "custom_tool_call_output"):
        text = _join_texts(item.output or "", f"input[{i}].output", shows_images=True)
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    if item.role == "tool":
        text = _join_texts(item.content or "", f"input[{i}].content", shows_images=True)
        return {"role": "tool", "tool_call_id": item.tool_call_id, "content": text}
    return {"role": item.role, "content": _join_texts(item.content or "", f"input[{i}].content")}


def _join_texts(
    content: str | Sequence[ContentPart],
    key: str,
    separator: str = "\n",
    *,
    shows_images: bool = False,
) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for j, part in enumerate(content):
        if shows_images and part.type in _IMAGE_PART_TYPES:
            texts.append(format_left_out_part(part.type))
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXT_PART_TYPES, "refusal") or text is None:
            problem = f"content parts of type {part.type!r} are not supported"
            raise ProxyRequestError(400, problem, key=f"{key}[{j}].type")
        texts.append(text)
    return separator.join(texts)
