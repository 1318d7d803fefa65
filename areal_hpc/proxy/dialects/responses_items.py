"""Items and tools of OpenAI's Responses API.

A client sends the items of one reply (reasoning, a message, calls) back one by one; they are joined
to one message of the assistant. An item's id contains that of its reply, so that a later request
may send the id alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec
from msgspec import Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.chat import ContentPart, ToolCall, read_call
from areal_hpc.proxy.dialects.dialect import ContentBlock, split_into_blocks
from areal_hpc.proxy.dialects.parameters import IgnoredParam, list_ignored_params
from areal_hpc.proxy.dialects.validation import (
    CustomFormat,
    ToolName,
    build_custom_tool_schema,
    build_function_tool,
    decode_request_json,
    encode_custom_input,
    filter_out_hosted_tools,
    format_left_out_part,
    read_custom_input,
)
from areal_hpc.proxy.engine.model_call import (
    ReplyContent,
    ReplyToolCall,
    format_tool_call,
)
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message, write_json_text
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire.decoding import convert_value


class _ToolFunction(Struct, tag="function", forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: IgnoredParam = None


class _ToolNamespace(Struct, tag="namespace", forbid_unknown_fields=True):
    name: str
    tools: list[_ToolFunction]
    description: str | None = None


class _CustomTool(Struct, tag="custom", forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    format: CustomFormat = msgspec.field(default_factory=CustomFormat)
    defer_loading: IgnoredParam = None


AnyTool = _ToolFunction | _ToolNamespace | _CustomTool


@dataclass(slots=True)
class OfferedTools:
    schemas: list[dict[str, Any]] = field(default_factory=list)
    namespaced_tools: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of the tools in a namespace, by their name in the prompt."""
    custom: set[str] = field(default_factory=set)


def qualify_tool_name(namespace: str | None, tool_name: str) -> str:
    return f"{namespace}.{tool_name}" if namespace and namespace != tool_name else tool_name


def parse_tools(
    raw_tools: Sequence[msgspec.Raw], ignored: list[str], dropped: list[str]
) -> OfferedTools:
    """Parse a request's tools. Hints in them are added to `ignored`, omitted types to `dropped`.

    The model gets a tool in a namespace as `namespace.name`, with the description of the namespace
    before its own. A custom tool is a function of one text.
    """
    offered = OfferedTools()
    hints: set[str] = set()
    for i, raw_tool in filter_out_hosted_tools(raw_tools, dropped):
        tool: AnyTool = decode_request_json(raw_tool, AnyTool, f"tools[{i}]", ignored)
        for declared in tool.tools if isinstance(tool, _ToolNamespace) else [tool]:
            hints.update(list_ignored_params(declared, "tools[]."))
            if isinstance(declared, _CustomTool):
                offered.custom.add(declared.name)
                offered.schemas.append(
                    build_custom_tool_schema(
                        declared.name, declared.description, declared.format, hints
                    )
                )
                continue
            name, description = declared.name, declared.description
            if isinstance(tool, _ToolNamespace):
                name = qualify_tool_name(tool.name, name)
                offered.namespaced_tools[name] = (tool.name, declared.name)
                description = "\n".join(filter(None, (tool.description, description))) or None
            offered.schemas.append(
                build_function_tool(name, description, declared.parameters, declared.strict)
            )
    ignored += sorted(hints)
    return offered


ID_PREFIX_WITH_INSTRUCTIONS = "resp_i"
"""Prefix of the id of a reply whose prompt began with `instructions`: a request that continues it
has instructions of its own. Other ids begin with `ID_PREFIX_WITHOUT_INSTRUCTIONS`."""
ID_PREFIX_WITHOUT_INSTRUCTIONS = "resp_n"
_ID_PREFIX_BY_KIND = {"text": "msg", "reasoning": "rs", "call": "fc"}
_CUSTOM_CALL_ID_PREFIX = "ctc"
_KIND_BY_ID_PREFIX = {
    _CUSTOM_CALL_ID_PREFIX: "call",
    **{prefix: kind for kind, prefix in _ID_PREFIX_BY_KIND.items()},
}
_NO_TOOLS = OfferedTools()


def is_custom_call(block: ContentBlock, tools: OfferedTools) -> bool:
    return block.kind == "call" and block.name in tools.custom


def build_item_id(answer_id: str, block: ContentBlock, tools: OfferedTools = _NO_TOOLS) -> str:
    number = answer_id[len(ID_PREFIX_WITHOUT_INSTRUCTIONS) :]
    is_custom = is_custom_call(block, tools)
    prefix = _CUSTOM_CALL_ID_PREFIX if is_custom else _ID_PREFIX_BY_KIND[block.kind]
    return f"{prefix}_{number}{block.index:02x}"


def format_item(
    answer_id: str,
    block: ContentBlock,
    status: str,
    logprobs: Sequence[dict[str, Any]] = (),
    tools: OfferedTools = _NO_TOOLS,
) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": build_item_id(answer_id, block, tools), "status": status}
    if is_custom_call(block, tools):
        text = read_custom_input(block.text)
        call = {"call_id": block.call_id, "name": block.name, "input": text}
        return {"type": "custom_tool_call", **fields, **call}
    if block.kind == "call":
        namespace, name = tools.namespaced_tools.get(block.name, (None, block.name))
        fields |= {"call_id": block.call_id, "name": name, "arguments": block.text}
        more = {"namespace": namespace} if namespace is not None else {}
        return {"type": "function_call", **fields, **more}
    content = [] if status == "in_progress" else [format_content_part(block, block.text, logprobs)]
    if block.kind == "reasoning":
        return {"type": "reasoning", **fields, "summary": [], "content": content}
    return {"type": "message", **fields, "role": "assistant", "content": content}


def format_content_part(
    block: ContentBlock, text: str, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def format_usage(answer: Interaction, reasoning_tokens: int = 0) -> dict[str, Any]:
    output_tokens = answer.num_output_tokens
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": min(reasoning_tokens, output_tokens)},
        "total_tokens": answer.prompt_tokens + output_tokens,
    }


def split_reply_into_blocks(message: Message) -> list[ContentBlock]:
    calls = []
    for index, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], write_json_text(call["function"]["arguments"])
        calls.append(ReplyToolCall(index, name, arguments, call.get("id") or f"call_{index}"))
    reasoning = message.get("reasoning_content") or ""
    return split_into_blocks(ReplyContent(message["content"], reasoning, calls))


def find_item_in_replies(tree: InteractionTree, item_id: str) -> dict[str, Any] | None:
    """Find an item of a reply in the tree by its id; None if there is none."""
    prefix, _, rest = item_id.partition("_")
    kind, number, index = _KIND_BY_ID_PREFIX.get(prefix), rest[:-2], rest[-2:]
    prefixes = (ID_PREFIX_WITH_INSTRUCTIONS, ID_PREFIX_WITHOUT_INSTRUCTIONS)
    answers = [tree[start + number] for start in prefixes if start + number in tree]
    if kind is None or not answers:
        return None
    interaction = answers[0]
    blocks = [block for block in split_reply_into_blocks(interaction.reply) if block.kind == kind]
    matches = [block for block in blocks if f"{block.index:02x}" == index] or blocks[:1]
    return format_item(interaction.interaction_id, matches[0], "completed") if matches else None


class InputItem(Struct):
    """Item of `input`, whose required fields depend on its type.

    Other fields of items that SDKs send back (`status`, `annotations`, ...) have no effect.
    """

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer", "tool"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    """JSON as text; an object if a client has decoded it."""
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    """Calls, and below the id of a result, of a message in the form of Chat Completions."""
    tool_call_id: str | None = None


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
"""Types of items of tools that a provider's servers run, and of histories they compacted."""
_IMAGE_PART_TYPES = ("input_image", "image_url", "input_file")
_TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def resolve_references(items: Sequence[InputItem], tree: InteractionTree) -> list[InputItem]:
    resolved = []
    for i, item in enumerate(items):
        is_bare = item.type == "message" and item.role is None and item.content is None
        if item.id is not None and (item.type == "item_reference" or is_bare):
            fields = find_item_in_replies(tree, item.id)
            if fields is None:
                problem = f"this session has no item {item.id!r:.300}"
                hint = "send the item itself"
                raise ProxyRequestError(400, problem, key=f"input[{i}].id", hint=hint)
            item = convert_value(fields, InputItem)
        resolved.append(item)
    return resolved


def build_messages(items: Sequence[InputItem], ignored: list[str]) -> Iterator[Message]:
    """Yield the messages that items represent, in normal form.

    Items of hosted tools are left out, and their types are added to `ignored`.
    """
    reply: dict[str, Any] = {}
    for i, item in enumerate(items):
        if _is_hosted(item):
            if (name := f"input[{item.type}]") not in ignored:
                ignored.append(name)
            continue
        _require_supported_complete_item(item, i)
        fields = _read_assistant_fields(item, i)
        if fields is None or not _continues_assistant_message(reply, fields):
            if reply:
                yield _build_assistant_message(reply)
            reply = {}
        if fields is None:
            yield normalize_chat_message(_build_non_assistant_message(item, i))
        else:
            calls = [*reply.get("tool_calls", ()), *fields.pop("tool_calls", ())]
            reply |= fields
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
        fnmatchcase(item.type, pattern) for pattern in _HOSTED_ITEM_TYPE_PATTERNS
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
            {"id": call.id, "function": read_call(call, f"input[{i}].tool_calls[{j}]")}
            for j, call in enumerate(item.tool_calls or ())
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
