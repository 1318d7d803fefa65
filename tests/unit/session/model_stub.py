"""What a proxy does with a tree between a request and its reply, without HTTP or a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from areal_hpc.session.chat_template import ChatTemplate, Message, TokenEncoder
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.session.tree import Interaction, InteractionTree, VersionSpan, unpack_ids
from tests.support.chatml import CHATML, byte_level_tokenizer

ENCODER = TokenEncoder(byte_level_tokenizer())
TEMPLATE = ChatTemplate(CHATML)
END_OF_TURN = ENCODER.encode("<|im_end|>")[0]
_numbers = count()


def user(text: str) -> Message:
    return normalize_chat_message({"role": "user", "content": text})


def assistant(text: str) -> Message:
    return normalize_chat_message({"role": "assistant", "content": text})


def prompt_ids(tree: InteractionTree, interaction: Interaction) -> list[int]:
    """The whole prompt of an interaction."""
    path = tree.path(interaction)
    ids = [
        i for one in path[:-1] for part in (one.new_ids, one.output_ids) for i in unpack_ids(part)
    ]
    return [int(i) for i in (*ids, *unpack_ids(interaction.new_ids))]


def say(
    tree: InteractionTree,
    messages: Sequence[Message],
    text: str,
    *,
    ids: Sequence[int] | None = None,
    closed: bool = True,
    template: ChatTemplate = TEMPLATE,
    temperature: float = 1.0,
    version: int = 7,
    during: tuple[float, float] = (0.0, 0.0),
    **how: Any,
) -> Interaction:
    """Answer `messages` with `text`; `ids` are the model's own tokens without the end of turn."""
    turn = tree.open_turn(messages, template, **how)
    new_ids = turn.new_ids(ENCODER.encode(turn.text))
    output = [*(ENCODER.encode(text) if ids is None else ids), *([END_OF_TURN] * closed)]
    prior = turn.parent.sequence_tokens if turn.parent else 0
    interaction = Interaction(
        interaction_id=f"chatcmpl-{next(_numbers)}",
        parent_id=turn.parent.interaction_id if turn.parent else None,
        reuse=turn.reuse,
        context=turn.context,
        new_messages=turn.new_messages,
        reply=assistant(text),
        prompt_tokens=prior + len(new_ids),
        new_ids=np.asarray(new_ids, "<i4").tobytes(),
        output_ids=np.asarray(output, "<i4").tobytes(),
        logprobs=np.linspace(-1, -0.5, len(output), dtype="<f4").tobytes(),
        spans=[VersionSpan(version, 0, len(output))],
        finish_reason="stop" if closed else "length",
        closed=closed,
        temperature=temperature,
        asked_at=during[0],
        answered_at=during[1],
    )
    tree.add(interaction)
    return interaction
