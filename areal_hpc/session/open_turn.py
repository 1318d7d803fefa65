"""Search for the interaction that a request continues, and for the new part of its prompt.

A conversation continues the interaction whose messages and reply it begins with. Only the text that
the chat template writes after that reply is tokenized. To find it, the whole conversation is
rendered with a mark in place of the reply's text: the text after the mark is right for every
template that prints the mark once, even if it depends on the history. A template may write a tool's
result only after its call, or end a turn otherwise after a call. So a reply with tool calls keeps
its calls, with the mark before the arguments of the last one, and the text that the model sampled
after that is removed.

A prompt of text or token ids reaches the model unchanged. It continues an interaction if it begins
with all tokens of that interaction's sequence, or with their text.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from areal_hpc.errors import ChatTemplateError
from areal_hpc.session.chat_template import ChatTemplate, Message, TokenEncoder
from areal_hpc.session.message_matching import align_tool_turns
from areal_hpc.session.tree import Interaction, InteractionTree, unpack_ids
from areal_hpc.wire.trajectory import PromptReuse

PREFILL_PLACEHOLDER = "\u241fthe reply begins here\u241f"
"""Text in place of a reply's beginning while the text before it is rendered."""
MAX_TURN_END_TOKENS = 16
"""Most tokens at the end of a reply that may end its turn."""
MAX_CALL_END_TOKENS = 64
"""Most tokens at the end of a reply that may end a tool call."""
MIN_LOCATED_MESSAGE_CHARS = 32
"""Length of the shortest message that is searched for in the rendered text."""


class OpenTurn(msgspec.Struct, frozen=True):
    """Turn that a request adds to the tree, before it is tokenized and answered."""

    parent: Interaction | None
    reuse: PromptReuse
    context: bytes
    new_messages: list[Message]
    new_text: str
    differing_field: str | None = None
    """Field in which the client's history departs from the recorded one; None if it does not."""

    @property
    def text_after_messages(self) -> str:
        """Text of the template after the last message, which may open the reply's reasoning.

        Marks of reasoning within a message, such as a file that an agent has read, are left out. If
        the client began the reply, or the template rewrote the message, it is the whole text.
        """
        last = self.new_messages[-1] if self.new_messages else {}
        content = last.get("content")
        if last.get("role") == "assistant" or not isinstance(content, str):
            return self.new_text
        content = content.strip()
        # The template's own text may contain a shorter one.
        return (
            self.new_text.rpartition(content)[2]
            if len(content) >= MIN_LOCATED_MESSAGE_CHARS
            else self.new_text
        )

    def drop_repeated_turn_end(self, encoded: list[int]) -> list[int]:
        """Return the prompt ids after the parent's sequence, from the encoding of `new_text`.

        The text after a reply begins with the end of its turn, which the model has already sampled
        if it closed the turn itself.
        """
        parent = self.parent
        if parent is None or not parent.closed:
            return encoded
        ends = memoryview(parent.output_ids[-4 * MAX_TURN_END_TOKENS :]).cast("i").tolist()
        for count in range(min(len(ends), len(encoded)), 0, -1):
            if ends[-count] == encoded[0] and ends[-count:] == encoded[:count]:
                return encoded[count:]
        return encoded


def build_open_turn(
    tree: InteractionTree,
    messages: list[Message],
    template: ChatTemplate,
    encoder: TokenEncoder,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    prefill: str | None = None,
    separate_agent_id: str = "",
) -> OpenTurn:
    """Find the interaction that a conversation in normal form continues, and render the new text.

    The text ends with `prefill` if the reply shall continue that.
    """

    def render(conversation: Sequence[Message]) -> str:
        if prefill is None:
            return template.render_prompt(conversation, tools=tools, variables=variables)
        # The template may print text, such as an empty reasoning, before that of a reply.
        reply: Message = {"role": "assistant", "content": PREFILL_PLACEHOLDER}
        text = template.render_prompt([*conversation, reply], tools=tools, variables=variables)
        before, placeholder, rest = text.partition(PREFILL_PLACEHOLDER)
        if not placeholder or PREFILL_PLACEHOLDER in rest:
            problem = "it does not show where a reply's text begins, so no reply can be continued"
            raise ChatTemplateError(problem)
        return before + prefill

    messages = align_tool_turns(messages, tree.reply_by_call_id)
    context = msgspec.json.encode([tools, variables]) if tools or variables else b""
    parent, replies, differing = tree.find_longest_match(context, messages, separate_agent_id)
    if parent is not None:
        last_ids = parent.output_ids[-4 * MAX_CALL_END_TOKENS :]

        def decode_reply_end(skipped_tokens: int) -> str:
            ids = unpack_ids(last_ids).tolist()
            return encoder.decode(ids[: len(ids) - skipped_tokens])

        suffix = _render_text_after_reply(
            render, template, messages, replies, lambda: decode_reply_end(int(parent.closed))
        )
        if suffix is not None:
            last, within = template.changing_turn_end
            if parent.closed and last and decode_reply_end(0).endswith(last):
                suffix = suffix.removeprefix(within)  # the sampled end takes its place
            new = list(messages[replies[-1] + 1 :])
            return OpenTurn(parent, "reused", context, new, suffix, differing)
    text = render(messages)
    reuse: PromptReuse = "none" if parent is None else "retokenized"
    return OpenTurn(None, reuse, context, list(messages), text, differing)


REPLY_MARK = f"reply-{secrets.token_hex(8)}"
"""Text that no client can have read before. It is ASCII, because one character beyond ASCII would
double the bytes of a conversation without others."""
MARKED_ARGUMENT = "!"
"""Name that comes before all others, also in a template that sorts arguments."""
MIN_COMMON_CHARS = 2
MAX_END_CHARS = 512
"""Limit of the text that a template writes after a call; arguments may be as long as a file."""
Render = Callable[[Sequence[Message]], str]


def _render_text_after_reply(
    render: Render,
    template: ChatTemplate,
    messages: Sequence[Message],
    reply_indices: Sequence[int],
    get_reply_end: Callable[[], str],
) -> str | None:
    """Return the text after the last recorded reply in `messages`; None if no rendering shows it.

    Only the position of the other replies matters: they are rendered without reasoning, and with
    one call each if the template refuses them all. `get_reply_end` returns the end of the last
    reply's text, without its stop token.
    """
    last = reply_indices[-1]
    for keeps_all_calls in (True, False):
        conversation = [*messages]
        for i in reply_indices:
            if "tool_calls" in messages[i] or "reasoning_content" in messages[i]:
                conversation[i] = _build_bare_reply(messages[i], keeps_all_calls)
        for reply in _list_marked_replies(conversation[last]):
            conversation[last] = reply
            try:
                rendered = render(conversation)
                call_end = _find_call_end(template, reply, get_reply_end)
            except ChatTemplateError:
                continue
            index = rendered.find(REPLY_MARK)
            text = rendered[index + len(REPLY_MARK) :]  # `partition` would copy the history
            if index >= 0 and REPLY_MARK not in text and text.startswith(call_end):
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
        last = calls[-1]["function"]["arguments"]
        arguments = {MARKED_ARGUMENT: REPLY_MARK, **(last if isinstance(last, dict) else {})}
        function = {**calls[-1]["function"], "arguments": arguments}
        marked: list[Any] = [*calls[:-1], {**calls[-1], "function": function}]
        yield {"role": "assistant", "content": "", "tool_calls": marked}
    yield {"role": "assistant", "content": REPLY_MARK}


def _find_call_end(template: ChatTemplate, reply: Message, get_reply_end: Callable[[], str]) -> str:
    """Return the text that the template writes from the mark to the end of the sampled reply.

    Without a call it is empty. Else the conversation is rendered up to the reply: the result is the
    part after the mark that has the longest end in common with the sampled text; without a common
    end, all but the end of the turn.
    """
    if "tool_calls" not in reply:
        return ""
    sampled = get_reply_end()

    def render_end(reply: Message) -> str:
        text = template.render_prompt([{"role": "user", "content": "x"}, reply], opens_reply=False)
        return text.rpartition(REPLY_MARK)[2]

    written = render_end(reply)
    ends = range(len(written), max(len(written) - MAX_END_CHARS, 0), -1)
    common = {end: _count_common_last_chars(written, end, sampled) for end in ends}
    best = max(ends, key=lambda end: common[end], default=0)
    if best and common[best] >= MIN_COMMON_CHARS:
        return written[:best]
    return written.removesuffix(render_end({"role": "assistant", "content": REPLY_MARK}))


def _count_common_last_chars(written: str, end: int, sampled: str) -> int:
    count = 0
    while count < min(end, len(sampled)) and written[end - count - 1] == sampled[-count - 1]:
        count += 1
    return count


RAW_PROMPT_CONTEXT = b'"prompt"'
"""Context of such prompts; that of a conversation is the tools and variables of its rendering."""
PROMPT_ROLE = "prompt"
TextOrBytes = TypeVar("TextOrBytes", str, bytes)


def match_text_prompt(
    tree: InteractionTree, prompt: str, encoder: TokenEncoder, separate_agent_id: str = ""
) -> OpenTurn:
    """Find the interaction that a text continues; the text may lack its leading special tokens."""
    lead = encoder.encode("", add_special_tokens=True)

    def decode(interaction: Interaction) -> list[str]:
        ids = unpack_ids(interaction.new_ids + interaction.output_ids).tolist()
        texts = [encoder.decode(ids)]
        if interaction.parent_id is None and lead and ids[: len(lead)] == lead:
            texts.append(encoder.decode(ids[len(lead) :]))
        return texts

    parent, end = _find_longest_prefix(
        tree, separate_agent_id, prompt, lambda call: tree.get_own_texts(call, decode)
    )
    return _build_raw_turn(parent, prompt[end:])


def match_ids_prompt(
    tree: InteractionTree,
    prompt: Sequence[int],
    encoder: TokenEncoder,
    separate_agent_id: str = "",
) -> tuple[OpenTurn, list[int]]:
    """Find the interaction that token ids continue; return the turn and the ids after it."""
    packed = np.asarray(prompt, "<i4").tobytes()
    parent, end = _find_longest_prefix(
        tree, separate_agent_id, packed, lambda call: [call.new_ids + call.output_ids]
    )
    new_ids = list(prompt[end // 4 :])
    return _build_raw_turn(parent, encoder.decode(new_ids)), new_ids


def _build_raw_turn(parent: Interaction | None, tail: str) -> OpenTurn:
    reuse: PromptReuse = "none" if parent is None else "reused"
    return OpenTurn(
        parent, reuse, RAW_PROMPT_CONTEXT, [{"role": PROMPT_ROLE, "content": tail}], tail
    )


def _find_longest_prefix(
    tree: InteractionTree,
    separate_agent_id: str,
    prompt: TextOrBytes,
    list_forms: Callable[[Interaction], Sequence[TextOrBytes]],
) -> tuple[Interaction | None, int]:
    children: dict[str | None, list[Interaction]] = defaultdict(list)
    for interaction in tree:
        if interaction.separate_agent_id == separate_agent_id:
            children[interaction.parent_id].append(interaction)
    parent: Interaction | None = None
    longest = 0
    reached: list[tuple[str | None, int]] = [(None, 0)]
    while reached:
        interaction_id, start = reached.pop()
        for child in children[interaction_id]:
            for form in list_forms(child):
                if form and prompt.startswith(form, start):
                    end = start + len(form)
                    reached.append((child.interaction_id, end))
                    if end >= longest:
                        parent, longest = child, end
                    break
    return parent, longest
