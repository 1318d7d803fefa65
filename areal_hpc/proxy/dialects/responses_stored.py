"""OpenAI Responses that were answered before: retrieved, deleted, and what they were asked.

A Response is given as it was, while the proxy lives and the session keeps it.
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
"""Items of one page: at most, and unless `limit` says otherwise."""


def retrieve_response(session: Session, response_id: str, query: Query) -> bytes:
    if query.get("stream") == "true":
        problem = "a Response that has been answered is not streamed again"
        raise ProxyRequestError(400, problem, key="stream")
    _find_response(session, response_id)
    return session.responses[response_id]


def delete_response(session: Session, response_id: str, query: Query) -> bytes:
    """Give a Response no more. What was said stays recorded, and may be gone on from."""
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
    """The items that a Response answered, those of earlier Responses among them."""
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
    place = 0
    for one in path:
        for message in one.new_messages[begins_with_instructions and one is path[0] :]:
            yield from _build_message_items(message, f"{number}i{place:03x}")
            place += 1
        if one is not interaction:
            for block in split_reply_into_blocks(one.reply):
                yield format_item(one.interaction_id, block, "completed")


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
        named = {"id": f"msg_{id_suffix}", "type": "message", "status": "completed"}
        yield {**named, "role": role, "content": [part]}
