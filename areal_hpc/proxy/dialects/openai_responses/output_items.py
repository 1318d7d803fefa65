"""OpenAI Responses output items: what a reply consists of, each with an id of its own.

An item's id holds that of its reply, so that a later request may name the item alone.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from areal_hpc.proxy.dialects.blocks import ContentBlock, split_into_blocks
from areal_hpc.proxy.dialects.custom_tools import read_custom_input
from areal_hpc.proxy.dialects.openai_responses.tools import OfferedTools
from areal_hpc.proxy.engine.model_call import ReplyContent, ReplyToolCall
from areal_hpc.session.chat_template import Message
from areal_hpc.session.tree import Interaction, InteractionTree

ID_PREFIX_WITH_INSTRUCTIONS = "resp_i"
"""How the ids of replies begin whose prompt began with `instructions`: a next request that names
such a reply brings its own. Other ids begin with `ID_PREFIX_WITHOUT_INSTRUCTIONS`."""
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
        called = {"call_id": block.call_id, "name": block.name, "input": text}
        return {"type": "custom_tool_call", **fields, **called}
    if block.kind == "call":
        namespace, name = tools.namespace_and_name_by_tool.get(block.name, (None, block.name))
        fields |= {"call_id": block.call_id, "name": name, "arguments": block.text}
        placed = {"namespace": namespace} if namespace is not None else {}
        return {"type": "function_call", **fields, **placed}
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


def format_response(
    answer_id: str, created_at: int, status: str, model_name: str, **fields: Any
) -> dict[str, Any]:
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    frame = {"id": answer_id, "object": "response", "created_at": created_at, "status": status}
    known = {"background": False, "error": None, "incomplete_details": cut, "model": model_name}
    return {**frame, **known, **fields}


def format_usage(answer: Interaction, reasoning_tokens: int = 0) -> dict[str, Any]:
    said = answer.num_output_tokens
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": min(reasoning_tokens, said)},
        "total_tokens": answer.prompt_tokens + said,
    }


def split_reply_into_blocks(message: Message) -> list[ContentBlock]:
    calls = []
    for index, one in enumerate(message.get("tool_calls", ())):
        name, arguments = one["function"]["name"], one["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        calls.append(ReplyToolCall(index, name, arguments, one.get("id") or f"call_{index}"))
    reasoning = message.get("reasoning_content") or ""
    return split_into_blocks(ReplyContent(message["content"], reasoning, calls))


def is_response_id(reply_id: str) -> bool:
    return reply_id.startswith((ID_PREFIX_WITH_INSTRUCTIONS, ID_PREFIX_WITHOUT_INSTRUCTIONS))


def find_item_in_replies(tree: InteractionTree, item_id: str) -> dict[str, Any] | None:
    """The item of this id, of a reply in the tree; None if there is none."""
    prefix, _, rest = item_id.partition("_")
    kind, number, place = _KIND_BY_ID_PREFIX.get(prefix), rest[:-2], rest[-2:]
    interaction = _find_response_by_id_suffix(tree, number)
    if kind is None or interaction is None:
        return None
    blocks = [one for one in split_reply_into_blocks(interaction.reply) if one.kind == kind]
    found = [one for one in blocks if f"{one.index:02x}" == place] or blocks[:1]
    return format_item(interaction.interaction_id, found[0], "completed") if found else None


def _find_response_by_id_suffix(tree: InteractionTree, id_suffix: str) -> Interaction | None:
    for prefix in (ID_PREFIX_WITH_INSTRUCTIONS, ID_PREFIX_WITHOUT_INSTRUCTIONS):
        if prefix + id_suffix in tree:
            return tree[prefix + id_suffix]
    return None
