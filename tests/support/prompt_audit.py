"""The tokens of a recorded prompt, and those of a fresh rendering of its conversation.

They may differ without an error: a template drops earlier reasoning, trims text, or splits words
unlike the model.
"""

import msgspec
import numpy as np

from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.session.open_turn import RAW_PROMPT_CONTEXT
from areal_hpc.session.tree import Interaction, InteractionTree, unpack_ids


def prompt_ids(tree: InteractionTree, interaction: Interaction) -> list[int]:
    """The whole prompt of an interaction, as the model read it."""
    *before, last = tree.get_path_to(interaction)
    parts = [unpack_ids(part) for call in before for part in (call.new_ids, call.output_ids)]
    ids: list[int] = np.concatenate([*parts, unpack_ids(last.new_ids)]).tolist()
    return ids


def rendered_ids(
    tree: InteractionTree, interaction: Interaction, template: ChatTemplate, encoder: TokenEncoder
) -> list[int]:
    """Render and tokenize the whole conversation of an interaction's prompt anew."""
    path = tree.get_path_to(interaction)
    if any(call.context == RAW_PROMPT_CONTEXT for call in path):  # a text, not a conversation
        return encoder.encode(encoder.decode(prompt_ids(tree, interaction)))
    messages = [m for call in path for m in (*call.new_messages, call.reply)][:-1]
    context = path[0].context
    tools, variables = msgspec.json.decode(context) if context else (None, None)
    text = template.render_prompt(messages, tools=tools, variables=variables)
    return encoder.encode(text)
