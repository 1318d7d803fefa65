"""Stub of a proxy's work on a tree between request and reply, without HTTP or a model."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from areal_hpc.session.chat_template import ChatTemplate, Message, TokenEncoder
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.session.open_turn import OpenTurn, build_open_turn
from areal_hpc.session.tree import Interaction, InteractionTree, VersionSpan, pack_ids
from tests.support.chatml import CHATML, byte_level_tokenizer

ENCODER = TokenEncoder(byte_level_tokenizer())
TEMPLATE = ChatTemplate(CHATML)
END_OF_TURN = ENCODER.encode("<|im_end|>")[0]
_numbers = count()


def user(text: str) -> Message:
    return normalize_chat_message({"role": "user", "content": text})


def assistant(text: str) -> Message:
    return normalize_chat_message({"role": "assistant", "content": text})


def turn(reply: str, question: str = "b") -> list[Message]:
    return [assistant(reply), user(question)]


def answer(
    tree: InteractionTree,
    turn: OpenTurn,
    new_ids: Sequence[int],
    reply: Message,
    output_ids: Sequence[int],
    *,
    closed: bool = True,
    temperature: float = 1.0,
    version: int = 7,
    is_retry: bool = False,
    agent: tuple[str, str] = ("", ""),
    during: tuple[float, float] = (0.0, 0.0),
) -> Interaction:
    """Add the model's output of a turn to the tree."""
    prior = turn.parent.num_sequence_tokens if turn.parent else 0
    interaction = Interaction(
        interaction_id=f"chatcmpl-{next(_numbers)}",
        parent_id=turn.parent.interaction_id if turn.parent else None,
        reuse=turn.reuse,
        context=turn.context,
        new_messages=turn.new_messages,
        reply=reply,
        prompt_tokens=prior + len(new_ids),
        new_ids=pack_ids(new_ids),
        output_ids=pack_ids(output_ids),
        logprobs=np.linspace(-1, -0.5, len(output_ids), dtype="<f4").tobytes(),
        spans=[VersionSpan(version, 0, len(output_ids))],
        finish_reason="stop" if closed else "length",
        closed=closed,
        temperature=temperature,
        is_retry=is_retry,
        agent_id=agent[0],
        parent_agent_id=agent[1],
        is_agent_separate=True,
        asked_at=during[0],
        answered_at=during[1],
        is_reward_named=True,  # a test may set one
    )
    tree.add(interaction)
    return interaction


def say(
    tree: InteractionTree,
    messages: Sequence[Message],
    text: str,
    *,
    ids: Sequence[int] | None = None,
    closed: bool = True,
    template: ChatTemplate = TEMPLATE,
    tools: list[dict[str, Any]] | None = None,
    variables: dict[str, Any] | None = None,
    agent: tuple[str, str] = ("", ""),
    **how: Any,
) -> Interaction:
    """Answer `messages` with `text`; `ids` are the model's own tokens without the end of turn."""
    turn = build_open_turn(
        tree,
        [*messages],
        template,
        ENCODER,
        tools=tools,
        variables=variables,
        separate_agent_id=agent[0],
    )
    output_ids = [*(ENCODER.encode(text) if ids is None else ids), *([END_OF_TURN] * closed)]
    new_ids = turn.drop_repeated_turn_end(ENCODER.encode(turn.new_text))
    return answer(
        tree, turn, new_ids, assistant(text), output_ids, closed=closed, agent=agent, **how
    )


def branches(left: float | None, right: float | None) -> tuple[InteractionTree, list[Interaction]]:
    """Build a tree of a reply that two others extend, with the rewards of these."""
    tree = InteractionTree()
    replies = [
        say(tree, [user("a")], "one", during=(0, 1)),
        say(tree, [user("a"), *turn("one")], "left", during=(1, 2)),
        say(tree, [user("a"), *turn("one", "c")], "right", during=(2, 3)),
    ]
    replies[1].reward, replies[2].reward = left, right
    return tree, replies
