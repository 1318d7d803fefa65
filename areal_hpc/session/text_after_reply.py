"""Text that a chat template writes after a reply whose tokens are known.

Only this part of a reused prompt is tokenized. The whole conversation is rendered with a mark in
the place of the reply's text: what comes after that is right for every template that prints the
mark once, whatever it remembers of the history. A template may write a tool's result only after the
call that it answers, or end a turn otherwise after a call. So a reply that called keeps its calls,
with the mark before the arguments of the last, and what the model said after that is taken off.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from areal_hpc.errors import ChatTemplateError
from areal_hpc.session.chat_template import ChatTemplate, Message

REPLY_MARK = f"reply-{secrets.token_hex(8)}"
"""No text that a client has read somewhere. ASCII, because one character beyond it would double the
bytes of a conversation that has no other."""
MARKED_ARGUMENT = "!"
"""Comes before the others, also in a template that sorts them."""
MIN_COMMON_CHARS = 2
MAX_END_CHARS = 512
"""What a template writes after a call is shorter; arguments may be as long as a file."""
Render = Callable[[Sequence[Message]], str]


def render_text_after_reply(
    render: Render,
    template: ChatTemplate,
    messages: Sequence[Message],
    reply_indices: Sequence[int],
    get_said: Callable[[], str],
) -> str | None:
    """The text after the last of the replies in `messages` that we know.

    None if the template does not tell that. The other replies matter only for where they stand: a
    template that refuses what one of them holds is given it without. `get_said` gives how the last
    one ends, its stop token left out.
    """
    last = reply_indices[-1]
    for keeps_all_calls in (True, False):
        conversation = [*messages]
        for i in reply_indices:
            if len(messages[i]) > len(("role", "content")):
                conversation[i] = _build_bare_reply(messages[i], keeps_all_calls)
        for reply in _list_marked_replies(conversation[last]):
            conversation[last] = reply
            try:
                rendered = render(conversation)
                call_end = _find_said_call_end(template, reply, get_said)
            except ChatTemplateError:
                continue
            at = rendered.find(REPLY_MARK)
            text = rendered[at + len(REPLY_MARK) :]  # a history before it is not copied
            if at >= 0 and REPLY_MARK not in text and text.startswith(call_end):
                return text[len(call_end) :]
    return None


def _build_bare_reply(message: Message, keeps_all_calls: bool) -> Message:
    if "reasoning_content" in message:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
    if not keeps_all_calls and (calls := message.get("tool_calls")):
        message = {**message, "tool_calls": calls[:1]}
    return message


def _list_marked_replies(reply: Message) -> Iterable[Message]:
    if calls := reply.get("tool_calls"):
        given = calls[-1]["function"]["arguments"]
        arguments = {MARKED_ARGUMENT: REPLY_MARK, **(given if isinstance(given, dict) else {})}
        function = {**calls[-1]["function"], "arguments": arguments}
        marked: list[Any] = [*calls[:-1], {**calls[-1], "function": function}]
        yield {"role": "assistant", "content": "", "tool_calls": marked}
    yield {"role": "assistant", "content": REPLY_MARK}


def _find_said_call_end(template: ChatTemplate, reply: Message, get_said: Callable[[], str]) -> str:
    """What the template writes from the mark to the end of what the model said.

    It is nothing after a text. After a call it is as much of what the template writes there, if the
    conversation ends with it, as ends most like `get_said`; if nothing does, all but the turn's
    end.
    """
    if "tool_calls" not in reply:
        return ""
    said = get_said()

    def render_end(reply: Message) -> str:
        text = template.render_prompt([{"role": "user", "content": "x"}, reply], opens_reply=False)
        return text.rpartition(REPLY_MARK)[2]

    written = render_end(reply)
    ends = range(len(written), max(len(written) - MAX_END_CHARS, 0), -1)
    common = {end: _count_common_last_chars(written, end, said) for end in ends}
    best = max(ends, key=lambda end: common[end], default=0)
    if best and common[best] >= MIN_COMMON_CHARS:
        return written[:best]
    return written.removesuffix(render_end({"role": "assistant", "content": REPLY_MARK}))


def _count_common_last_chars(written: str, end: int, said: str) -> int:
    count = 0
    while count < min(end, len(said)) and written[end - count - 1] == said[-count - 1]:
        count += 1
    return count
