"""What a request continues, and what of its prompt is new.

A conversation continues the interaction whose messages and reply it begins with. Only the text that
the chat template writes after that reply is tokenized. The whole conversation is rendered with a
mark in the place of the reply's text: what comes after that is right for every template that prints
the mark once, whatever it remembers of the history. A template may write a tool's result only after
the call that it answers, or end a turn otherwise after a call. So a reply that called keeps its
calls, with the mark before the arguments of the last, and what the model said after that is taken
off.

A prompt of text or token ids is read by the model as it is. It continues an interaction if it
begins with all of that one's tokens, or with the text of all of them.
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
"""Stands for the beginning of a reply while what comes before it is rendered."""
MAX_TURN_END_TOKENS = 16
MAX_CALL_END_TOKENS = 64
"""So many last tokens of a reply may be what its turn, or a call in it, ends with."""
MIN_LOCATED_MESSAGE_CHARS = 32
"""Length from which a message is looked for in the rendered text."""


class OpenTurn(msgspec.Struct, frozen=True):
    """Addition of a request to the tree, before it is tokenized and answered."""

    parent: Interaction | None
    reuse: PromptReuse
    context: bytes
    new_messages: list[Message]
    new_text: str
    differing_field: str | None = None
    """In what the client's history departs from ours; None when it does not."""

    @property
    def text_after_messages(self) -> str:
        """What the template says behind the last message, which may open the reply's reasoning.

        Marks of reasoning within a message, such as a file that an agent has read, are not the
        template's. All of the text where a reply was begun, or the template rewrote the message.
        """
        last = self.new_messages[-1] if self.new_messages else {}
        content = last.get("content")
        if last.get("role") == "assistant" or not isinstance(content, str):
            return self.new_text
        content = content.strip()
        # A shorter one may stand in what the template says, too.
        return (
            self.new_text.rpartition(content)[2]
            if len(content) >= MIN_LOCATED_MESSAGE_CHARS
            else self.new_text
        )

    def drop_repeated_turn_end(self, encoded: list[int]) -> list[int]:
        """Prompt ids after the parent's sequence, from the encoding of `new_text`.

        The text after a reply begins with what ends a turn. A model that closed its turn has
        already said it.
        """
        parent = self.parent
        if parent is None or not parent.closed:
            return encoded
        said = memoryview(parent.output_ids[-4 * MAX_TURN_END_TOKENS :]).cast("i").tolist()
        for count in range(min(len(said), len(encoded)), 0, -1):
            if said[-count] == encoded[0] and said[-count:] == encoded[:count]:
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
) -> OpenTurn:
    """Find what a conversation in normal form continues, and render what is new.

    The text ends with `prefill` where the reply is to go on from that.
    """

    def render(conversation: Sequence[Message]) -> str:
        if prefill is None:
            return template.render_prompt(conversation, tools=tools, variables=variables)
        # What the template prints before a reply's text, as an empty reasoning, stands before.
        begun: Message = {"role": "assistant", "content": PREFILL_PLACEHOLDER}
        text = template.render_prompt([*conversation, begun], tools=tools, variables=variables)
        before, placeholder, rest = text.partition(PREFILL_PLACEHOLDER)
        if not placeholder or PREFILL_PLACEHOLDER in rest:
            problem = "it does not tell where a reply's text begins, to go on from there"
            raise ChatTemplateError(problem)
        return before + prefill

    messages = align_tool_turns(messages, tree.reply_by_call_id)
    context = msgspec.json.encode([tools, variables]) if tools or variables else b""
    parent, replies, forked = tree.find_longest_match(context, messages)
    if parent is not None:
        said = parent.output_ids[-4 * MAX_CALL_END_TOKENS :]

        def decode_said(skipped_tokens: int) -> str:
            ids = unpack_ids(said).tolist()
            return encoder.decode(ids[: len(ids) - skipped_tokens])

        suffix = _render_text_after_reply(
            render, template, messages, replies, lambda: decode_said(int(parent.closed))
        )
        if suffix is not None:
            last, within = template.changing_turn_end
            if parent.closed and last and decode_said(0).endswith(last):
                suffix = suffix.removeprefix(within)  # what it said stands for that
            new = list(messages[replies[-1] + 1 :])
            return OpenTurn(parent, "reused", context, new, suffix, forked)
    text = render(messages)
    reuse: PromptReuse = "none" if parent is None else "retokenized"
    return OpenTurn(None, reuse, context, list(messages), text, forked)


REPLY_MARK = f"reply-{secrets.token_hex(8)}"
"""No text that a client has read somewhere. ASCII, because one character beyond it would double the
bytes of a conversation that has no other."""
MARKED_ARGUMENT = "!"
"""Comes before the others, also in a template that sorts them."""
MIN_COMMON_CHARS = 2
MAX_END_CHARS = 512
"""What a template writes after a call is shorter; arguments may be as long as a file."""
Render = Callable[[Sequence[Message]], str]


def _render_text_after_reply(
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
            if "tool_calls" in messages[i] or "reasoning_content" in messages[i]:
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


RAW_PROMPT_CONTEXT = b'"prompt"'
"""Stands where conversations have the tools and variables they were rendered with."""
PROMPT_ROLE = "prompt"
TextOrBytes = TypeVar("TextOrBytes", str, bytes)


def match_text_prompt(tree: InteractionTree, prompt: str, encoder: TokenEncoder) -> OpenTurn:
    """Find what a text continues; without a parent it gets the leading tokens, such as Llama's."""
    lead = encoder.encode("", add_special_tokens=True)

    def decode(interaction: Interaction) -> list[str]:
        ids = unpack_ids(interaction.new_ids + interaction.output_ids).tolist()
        texts = [encoder.decode(ids)]
        if interaction.parent_id is None and lead and ids[: len(lead)] == lead:
            texts.append(encoder.decode(ids[len(lead) :]))
        return texts

    parent, known = _find_longest_prefix(tree, prompt, lambda one: tree.get_own_texts(one, decode))
    return _build_raw_turn(parent, prompt[known:])


def match_ids_prompt(
    tree: InteractionTree, prompt: Sequence[int], encoder: TokenEncoder
) -> tuple[OpenTurn, list[int]]:
    """Find what token ids continue, and cut off the parent's."""
    packed = np.asarray(prompt, "<i4").tobytes()
    parent, known = _find_longest_prefix(tree, packed, lambda one: [one.new_ids + one.output_ids])
    new_ids = list(prompt[known // 4 :])
    return _build_raw_turn(parent, encoder.decode(new_ids)), new_ids


def _build_raw_turn(parent: Interaction | None, tail: str) -> OpenTurn:
    reuse: PromptReuse = "none" if parent is None else "reused"
    return OpenTurn(
        parent, reuse, RAW_PROMPT_CONTEXT, [{"role": PROMPT_ROLE, "content": tail}], tail
    )


def _find_longest_prefix(
    tree: InteractionTree,
    prompt: TextOrBytes,
    list_forms: Callable[[Interaction], Sequence[TextOrBytes]],
) -> tuple[Interaction | None, int]:
    children: dict[str | None, list[Interaction]] = defaultdict(list)
    for one in tree:
        children[one.parent_id].append(one)
    found: Interaction | None = None
    longest = 0
    reached: list[tuple[str | None, int]] = [(None, 0)]
    while reached:
        interaction_id, known = reached.pop()
        for child in children[interaction_id]:
            for form in list_forms(child):
                if form and prompt.startswith(form, known):
                    end = known + len(form)
                    reached.append((child.interaction_id, end))
                    if end >= longest:
                        found, longest = child, end
                    break
    return found, longest
