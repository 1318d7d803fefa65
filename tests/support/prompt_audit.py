"""Token-by-token comparison of a recorded prompt with a fresh rendering of its conversation.

A template may render a history otherwise than the model read it, which is no error: it drops
earlier reasoning, trims text, or splits words unlike the model.
"""

from dataclasses import dataclass
from difflib import SequenceMatcher

import msgspec
import numpy as np

from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.session.completion_prompts import RAW_PROMPT_CONTEXT
from areal_hpc.session.tree import Interaction, InteractionTree, unpack_ids


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """A place where the two prompts part."""

    position: int
    """Index of the first differing token in the recorded prompt."""
    recorded_ids: list[int]
    rendered_ids: list[int]
    recorded_text: str
    rendered_text: str


def prompt_ids(tree: InteractionTree, interaction: Interaction) -> list[int]:
    """The whole prompt of an interaction, as the model read it."""
    *before, last = tree.get_path_to(interaction)
    parts = [unpack_ids(part) for one in before for part in (one.new_ids, one.output_ids)]
    ids: list[int] = np.concatenate([*parts, unpack_ids(last.new_ids)]).tolist()
    return ids


def rendered_ids(
    tree: InteractionTree, interaction: Interaction, template: ChatTemplate, encoder: TokenEncoder
) -> list[int]:
    """What the prompt would be if the conversation were rendered and tokenized anew."""
    path = tree.get_path_to(interaction)
    if any(one.context == RAW_PROMPT_CONTEXT for one in path):  # a text, not a conversation
        return encoder.encode(encoder.decode(prompt_ids(tree, interaction)))
    messages = [m for one in path for m in (*one.new_messages, one.reply)][:-1]
    context = path[0].context
    tools, variables = msgspec.json.decode(context) if context else (None, None)
    text = template.render_prompt(messages, tools=tools, variables=variables)
    return encoder.encode(text)


def audit_prompt(
    tree: InteractionTree, interaction: Interaction, template: ChatTemplate, encoder: TokenEncoder
) -> list[TokenDifference]:
    """Every place where an interaction's prompt is not what rendering would give."""
    recorded = prompt_ids(tree, interaction)
    rendered = rendered_ids(tree, interaction, template, encoder)
    start = _common(recorded, rendered)
    # What is equal at both ends is most of it; comparing the rest costs its square.
    end = _common(recorded[start:][::-1], rendered[start:][::-1])
    ours, theirs = recorded[start : len(recorded) - end], rendered[start : len(rendered) - end]
    return [
        TokenDifference(
            start + a,
            ours[a:b],
            theirs[c:d],
            encoder.decode(ours[a:b]),
            encoder.decode(theirs[c:d]),
        )
        for kind, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
        if kind != "equal"
    ]


def _common(ours: list[int], theirs: list[int]) -> int:
    """How many first elements are equal."""
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count
