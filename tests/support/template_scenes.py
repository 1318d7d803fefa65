"""Conversations in which the model writes what a chat template would write for it.

Each prompt must then equal the rendering of the whole conversation, unless the template changes
earlier turns when later ones follow.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from areal_hpc.errors import ChatTemplateError
from areal_hpc.session.chat_template import ChatTemplate, Message, TokenEncoder
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.session.open_turn import build_open_turn
from areal_hpc.session.tree import Interaction, InteractionTree, VersionSpan, pack_ids
from tests.support.chatml import byte_level_tokenizer

_MARK_PATTERN = re.compile("<[^<>'\"{}\\s]+>")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "", "pad_token": ""}
_PROPERTIES = {name: {"type": "integer", "description": name} for name in "ab"}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": _PARAMETERS},
    }
]
Outcome = Literal["equal", "equal end", "rewritten", "no rendering", "other"]


def _say(role: str, content: str, **fields: Any) -> Message:
    return normalize_chat_message({"role": role, "content": content, **fields})


def _call(call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


_ASKED, _MORE = _say("user", "first question"), _say("user", "second question")
_ONE, _OTHER = _call("call_1", a=1, b=2), _call("call_2", a=3, b=4)
_RESULT = _say("tool", "RESULT-1", tool_call_id="call_1")
_OTHER_RESULT = _say("tool", "RESULT-2", tool_call_id="call_2")
_CALLS = _say("assistant", "", tool_calls=[_ONE])
_ENDS = _say("assistant", "It is 3.")
SCENES: dict[str, list[Message]] = {
    "text": [_ASKED, _say("assistant", "Hello."), _MORE, _ENDS, _ASKED],
    "system": [_say("system", "Be kind."), _ASKED, _CALLS, _RESULT, _ENDS, _MORE],
    "call": [_ASKED, _CALLS, _RESULT, _ENDS, _MORE],
    "text and call": [
        *[_ASKED, _say("assistant", "Let me see.", tool_calls=[_ONE])],
        *[_RESULT, _ENDS, _MORE],
    ],
    "two calls": [
        *[_ASKED, _CALLS, _RESULT, _say("assistant", "", tool_calls=[_OTHER])],
        *[_OTHER_RESULT, _ENDS, _MORE],
    ],
    "parallel calls": [
        *[_ASKED, _say("assistant", "", tool_calls=[_ONE, _OTHER])],
        *[_RESULT, _OTHER_RESULT, _ENDS, _MORE],
    ],
    "reasoning": [
        *[_ASKED, _say("assistant", "Hi.", reasoning_content="Hm."), _MORE],
        *[_say("assistant", "", reasoning_content="A tool.", tool_calls=[_ONE]), _RESULT],
        *[_say("assistant", "It is 3.", reasoning_content="Good."), _MORE],
    ],
}


@dataclass(frozen=True)
class PlayedTurn:
    """Result of one request of a conversation, beginning with the second."""

    is_spliced: bool
    lost: Sequence[str]
    """Contents of new messages that the model does not read."""
    is_closed_twice: bool
    """The prompt repeats the end of the reply before it."""
    outcome: Outcome
    """Comparison of the prompt with the rendering of the whole conversation."""


def build_tokenizer(template_source: str) -> Tokenizer:
    """Build a tokenizer for which each mark in a template is one token."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(sorted({*_MARK_PATTERN.findall(template_source)}))
    return tokenizer


@cache
def build_template_and_encoder(template_source: str) -> tuple[ChatTemplate, TokenEncoder]:
    """Build a template, and the encoder of its tokenizer."""
    encoder = TokenEncoder(build_tokenizer(template_source))
    return ChatTemplate(template_source, SPECIAL_TOKENS), encoder


def play_scene(template_source: str, scene: Sequence[Message]) -> Iterator[PlayedTurn]:
    """Play the turns of a conversation after the first; ChatTemplateError for a refused one."""
    template, encoder = build_template_and_encoder(template_source)
    tree = InteractionTree()
    uses_tools = any(message["role"] == "tool" for message in scene)
    tools = TOOLS if uses_tools else None
    read = reply = ""
    replies = [i for i, message in enumerate(scene) if message["role"] == "assistant"]
    for end in [*replies, len(scene)]:
        messages = [*scene[:end]]
        turn = build_open_turn(tree, messages, template, encoder, tools=tools)
        new_ids = turn.drop_repeated_turn_end(encoder.encode(turn.new_text))
        new = encoder.decode(new_ids)
        prompt = (read if turn.parent else "") + new
        try:
            rendering = template.render_prompt(messages, tools=tools)
        except ChatTemplateError:  # such as parallel calls in a history
            rendering = None
        if reply:
            turn_end = _find_turn_end(template, reply)
            yield PlayedTurn(
                is_spliced=turn.parent is not None,
                lost=[m["content"] for m in turn.new_messages if m["content"] not in new],
                is_closed_twice=bool(turn_end) and new.startswith(turn_end),
                outcome=_compare(prompt, read, new, rendering, turn_end),
            )
        if end < len(scene):
            reply = _write_reply(template, messages, scene[end], tools)
            _add_reply(tree, turn.parent, turn.context, turn.new_messages, new_ids, scene[end])
            last = tree.last_completed
            last.output_ids = pack_ids(encoder.encode(reply))
            last.logprobs, last.spans = b"\0" * len(last.output_ids), [VersionSpan(0, 0, 1)]
            read = prompt + reply


def _compare(prompt: str, read: str, new: str, rendering: str | None, turn_end: str) -> Outcome:
    if rendering is None:
        return "no rendering"
    if prompt == rendering:
        return "equal"
    if rendering.endswith(turn_end + new):
        return "equal end"
    return "other" if rendering.startswith(read.removesuffix(turn_end)) else "rewritten"


def _find_turn_end(template: ChatTemplate, reply: str) -> str:
    """The mark that a reply ends with, as it stands within a conversation."""
    last = _MARK_PATTERN.findall(reply)[-1:]
    if not (last and reply.endswith(last[0])):
        return ""
    at_the_end, within = template.changing_turn_end
    return within if at_the_end == last[0] else last[0]


def _write_reply(
    template: ChatTemplate, messages: Sequence[Message], reply: Message, tools: Any
) -> str:
    """Write a reply by the template; of parallel calls that it refuses, one after the other."""
    try:
        prompt = template.render_prompt(messages, tools=tools)
        written = template.render_prompt([*messages, reply], tools=tools, opens_reply=False)
    except ChatTemplateError:
        calls = reply.get("tool_calls") or [None]
        if messages == [_ASKED] and len(calls) == 1:
            raise
        alone = [{**reply, "tool_calls": [call]} if call else reply for call in calls]
        parts = [_write_reply(template, [_ASKED], message, tools) for message in alone]
        end = _MARK_PATTERN.findall(parts[-1])[-1]
        return ";".join(part.removesuffix(end) for part in parts) + str(end)
    shared = (i for i, pair in enumerate(zip(prompt, written, strict=False)) if len({*pair}) > 1)
    return written[next(shared, len(prompt)) :].rstrip("\n")


def _add_reply(
    tree: InteractionTree,
    parent: Interaction | None,
    context: bytes,
    new_messages: list[Message],
    new_ids: Sequence[int],
    reply: Message,
) -> None:
    prior = parent.num_sequence_tokens if parent is not None else 0
    tree.add(
        Interaction(
            interaction_id=f"chatcmpl-{len(tree)}",
            parent_id=parent.interaction_id if parent is not None else None,
            reuse="reused" if parent is not None else "none",
            context=context,
            new_messages=new_messages,
            reply=reply,
            prompt_tokens=prior + len(new_ids),
            new_ids=np.asarray(new_ids, "<i4").tobytes(),
            output_ids=b"",
            logprobs=b"",
            spans=[],
            finish_reason="stop",
            closed=True,
            temperature=1.0,
        )
    )
