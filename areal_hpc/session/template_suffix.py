"""What a chat template writes after a reply: the only part of a reused prompt that is tokenized.

The whole conversation is rendered with a placeholder for the reply. What comes after the
placeholder is right for every template that prints the reply's content once, whatever the
template remembers of the history: there is no shortcut whose assumptions a template could break.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.errors import ChatTemplateError
from areal_hpc.session.chat_template import ChatTemplate, Message

REPLY_PLACEHOLDER = "\u241fthe reply stood here\u241f"
"""Stands for a reply while its surroundings are rendered."""


def render_reply_suffix(
    template: ChatTemplate,
    messages: Sequence[Message],
    reply_index: int,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
) -> str | None:
    """The text after a reply's own text; None if the template does not tell the two apart.

    The placeholder makes a template which trims replies, or hides earlier reasoning, give the
    same answer as one which prints them as they are.

    Args:
        template: The model's.
        messages: The whole conversation in normal form.
        reply_index: Where the reply stands in it.
        tools: Function schemas offered to the model.
        variables: Further template variables.
    """
    reply: Message = {"role": "assistant", "content": REPLY_PLACEHOLDER}
    conversation = [*messages[:reply_index], reply, *messages[reply_index + 1 :]]
    try:
        text = template.render(conversation, tools=tools, variables=variables)
    except ChatTemplateError:
        return None
    _, placeholder, suffix = text.partition(REPLY_PLACEHOLDER)
    return suffix if placeholder and REPLY_PLACEHOLDER not in suffix else None
