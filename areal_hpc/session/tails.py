"""What a chat template writes after a reply: the only part of a spliced prompt that is rendered.

Rendering a whole conversation for its last lines costs more with every turn. Most templates write
the same lines after a reply whatever went before it, so a short beginning stands for the history.
Whether a template is such a one is tried on many conversations, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from areal_hpc.session.template import ChatTemplate, Message, TemplateRefusal

REPLY_MARK = "\u241fthe reply stood here\u241f"
"""Stands for a reply while its surroundings are rendered."""
MARKED_REPLY: Message = {"role": "assistant", "content": REPLY_MARK}
Tools = Sequence[Mapping[str, Any]] | None
Variables = Mapping[str, Any] | None


def text_after_reply(
    template: ChatTemplate,
    messages: Sequence[Message],
    reply_index: int,
    tools: Tools,
    variables: Variables,
) -> str | None:
    """What the template writes after the reply's own text, or None if that cannot be told.

    The reply is replaced by a mark, so that a template which trims replies, or hides earlier
    reasoning, gives the same answer as one which prints them as they are.

    Args:
        template: The model's.
        messages: The whole conversation in normal form.
        reply_index: Where the reply stands in it.
        tools: Function schemas offered to the model.
        variables: Further template variables.
    """
    history: Sequence[Message] = messages[: _beginning(messages, reply_index)]
    if (variables or None) not in TRIED_VARIABLES or not is_local(template):
        history = messages[:reply_index]
    return _tail(template, history, messages[reply_index + 1 :], tools, variables)


def _beginning(messages: Sequence[Message], reply_index: int) -> int:
    """How many messages stand for all before the reply: a question, and what instructs it."""
    count = 1 if messages[0]["role"] == "system" else 0
    is_usual = count < reply_index and messages[count]["role"] == "user"
    return count + 1 if is_usual else reply_index


def _tail(
    template: ChatTemplate,
    history: Sequence[Message],
    later: Sequence[Message],
    tools: Tools,
    variables: Variables,
) -> str | None:
    marked = [*history, MARKED_REPLY, *later]
    try:
        text = template.render(marked, tools=tools, variables=variables)
    except TemplateRefusal:
        return None
    _, mark, tail = text.partition(REPLY_MARK)
    return tail if mark and REPLY_MARK not in tail else None


# Trials ------------------------------------------------------------------------------------

_CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
_PLACES: Mapping[str, Message] = {
    "s": {"role": "system", "content": "Be brief."},
    "u": {"role": "user", "content": "What is it?"},
    "w": {"role": "user", "content": " <tool_response>\nodd\n</tool_response>"},
    "a": {"role": "assistant", "content": "It is this."},
    "r": {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nThis.\n"},
    "R": {"role": "assistant", "content": "That.", "reasoning_content": "Hm."},
    "c": {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    "t": {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
}
_HISTORIES = ("suau", "uau", "usu", "suct", "uctctt", "uruRu", "suuau", "wawu", "uctau", "suauauct")
_LATER = ("u", "w", "t", "tt", "uu", "uau", "tu", "tct", "uRu", "su")
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
TRIED_TOOLS: tuple[Tools, ...] = (None, [_TOOL])
TRIED_VARIABLES: tuple[Variables, ...] = (
    None,
    {"enable_thinking": False},
    {"enable_thinking": True},
)


@lru_cache(maxsize=16)
def is_local(template: ChatTemplate) -> bool:
    """Whether what a template writes after a reply is the same for a short history.

    A history that the template refuses says nothing: a conversation does not grow beyond it.
    """
    for later, tools, variables in product(_LATER, TRIED_TOOLS, TRIED_VARIABLES):
        after = [_PLACES[place] for place in later]
        short: dict[str, str | None] = {}
        for history in _HISTORIES:
            before = [_PLACES[place] for place in history]
            count = _beginning(before, len(before))
            if history[:count] not in short:
                tail = _tail(template, before[:count], after, tools, variables)
                short[history[:count]] = tail
            expected = _tail(template, before, after, tools, variables)
            if expected not in (None, short[history[:count]]):
                return False
    return True
