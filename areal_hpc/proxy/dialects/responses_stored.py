"""Routes of OpenAI's Responses API for earlier Responses: retrieval, deletion, input items.

A retrieved Response is the original body; the session keeps it while the proxy lives.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.responses_items import (
    ID_PREFIX_WITH_INSTRUCTIONS,
    ID_PREFIX_WITHOUT_INSTRUCTIONS,
    format_item,
    split_reply_into_blocks,
)
from areal_hpc.proxy.dialects.validation import MAX_ID_DIGITS
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.chat_template import Message
from areal_hpc.session.tree import Interaction

Query = Mapping[str, str]
MAX_LISTED_ITEMS, DEFAULT_LISTED_ITEMS = 100, 20
"""Limit of the items of one page, and their number without the parameter `limit`."""


def retrieve_response(session: Session, response_id: str, query: Query) -> bytes:
    if query.get("stream") == "true":
        problem = "a Response that has been answered is not streamed again"
        raise ProxyRequestError(400, problem, key="stream")
    _find_response(session, response_id)
    return session.responses[response_id]


def delete_response(session: Session, response_id: str, query: Query) -> bytes:
    """Drop a Response. Its reply stays recorded, and later requests may continue it."""
    _find_response(session, response_id)
    session.drop_response(response_id)
    return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})


def refuse_cancellation(session: Session, response_id: str, query: Query) -> bytes:
    _find_response(session, response_id)
    hint = "close its connection while it is answered"
    raise ProxyRequestError(400, "no Response runs in the background here", hint=hint)


def refuse_compaction(session: Session) -> bytes:
    hint = "have the agent ask for a summary, and go on from that"
    raise ProxyRequestError(400, "this server compacts no history", hint=hint)


def encode_input_items(session: Session, response_id: str, query: Query) -> bytes:
    """Encode a page of the items that a Response answered, with those of earlier Responses."""
    items = [*_build_input_items(session, _find_response(session, response_id))]
    if query.get("order", "desc") != "asc":
        items.reverse()
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ProxyRequestError(400, f"there is no item {after!r:.100}", key="after")
        items = items[ids.index(after) + 1 :]
    limit = query.get("limit", str(DEFAULT_LISTED_ITEMS))
    if not (
        limit.isdecimal() and len(limit) <= MAX_ID_DIGITS and 1 <= int(limit) <= MAX_LISTED_ITEMS
    ):
        problem = f"expected a number from 1 to {MAX_LISTED_ITEMS}, got {limit!r:.100}"
        raise ProxyRequestError(400, problem, key="limit")
    page = items[: int(limit)]
    ends = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }
    return msgspec.json.encode({"object": "list", "data": page, **ends})


def _find_response(session: Session, response_id: str) -> Interaction:
    if response_id not in session.responses:
        raise ProxyRequestError(404, f"this session keeps no response {response_id!r:.300}")
    return session.tree[response_id]


def _build_input_items(session: Session, interaction: Interaction) -> Iterator[dict[str, Any]]:
    number = interaction.interaction_id[len(ID_PREFIX_WITH_INSTRUCTIONS) :]
    path = session.tree.get_path_to(interaction)
    begins_with_instructions = interaction.interaction_id.startswith(ID_PREFIX_WITH_INSTRUCTIONS)
    index = 0
    for call in path:
        for message in call.new_messages[begins_with_instructions and call is path[0] :]:
            yield from _build_message_items(message, f"{number}i{index:03x}")
            index += 1
        if call is not interaction:
            for block in split_reply_into_blocks(call.reply):
                yield format_item(call.interaction_id, block, "completed")


def _build_message_items(message: Message, id_suffix: str) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message["content"]
    if role == "assistant":
        for block in split_reply_into_blocks(message):
            yield format_item(ID_PREFIX_WITHOUT_INSTRUCTIONS + id_suffix, block, "completed")
    elif role == "tool":
        output = {"call_id": message.get("tool_call_id", ""), "output": content}
        yield {
            "id": f"fco_{id_suffix}",
            "type": "function_call_output",
            "status": "completed",
        } | output
    else:
        part = {"type": "input_text", "text": content}
        fields = {"id": f"msg_{id_suffix}", "type": "message", "status": "completed"}
        yield {**fields, "role": role, "content": [part]}
