"""Text or token-id prompts: which interaction they continue.

The model reads such a prompt as it is. It continues an interaction if it begins with all of that
one's tokens, or with the text of all of them: then the tokens are used again, as for messages.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.tree import Interaction, InteractionTree, OpenTurn, unpack_ids
from areal_hpc.wire.trajectory import PromptReuse

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

    parent, known = _find_longest_match(tree, prompt, lambda one: tree.get_own_texts(one, decode))
    return _build_open_turn(parent, prompt[known:])


def match_ids_prompt(
    tree: InteractionTree, prompt: Sequence[int], encoder: TokenEncoder
) -> tuple[OpenTurn, list[int]]:
    """Find what token ids continue, and cut off the parent's."""
    packed = np.asarray(prompt, "<i4").tobytes()
    parent, known = _find_longest_match(tree, packed, lambda one: [one.new_ids + one.output_ids])
    new_ids = list(prompt[known // 4 :])
    return _build_open_turn(parent, encoder.decode(new_ids)), new_ids


def _build_open_turn(parent: Interaction | None, tail: str) -> OpenTurn:
    reuse: PromptReuse = "none" if parent is None else "reused"
    return OpenTurn(
        parent, reuse, RAW_PROMPT_CONTEXT, [{"role": PROMPT_ROLE, "content": tail}], tail
    )


def _find_longest_match(
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
