"""Supervised fine-tuning on demonstrations: which tokens are learnt, in which order."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.errors import RecipeError
from areal_hpc.session.chat_template import ChatTemplate, Message
from areal_hpc.session.message_matching import normalize_chat_message
from areal_hpc.trainer.batch.packing import TrainingRow


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation in normal form that ends with an assistant's message."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """Schemas of the tools that its prompt shows."""


def read_demonstrations(path: Path) -> list[Demonstration]:
    """The conversations of a JSON-lines file, each ending with an assistant's message.

    Raises:
        RecipeError: A line is not such a conversation, or there is none.
    """
    conversations: list[Demonstration] = []
    with path.open() as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                conversations.append(_read_demonstration(line, f"{path}:{number}"))
    if not conversations:
        raise RecipeError("expected at least one demonstration, got none", key=str(path))
    return conversations


def _read_demonstration(line: str, location: str) -> Demonstration:
    problem = "a demonstration is {'messages': [...]} ending with an assistant's message"
    try:
        found = json.loads(line)
        messages = [normalize_chat_message(one) for one in found["messages"]]
        is_right = bool(messages) and messages[-1]["role"] == "assistant"
        tools: list[dict[str, Any]] | None = found.get("tools") or None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RecipeError(f"{problem}: {error!r}", key=location) from error
    if not is_right or not isinstance(tools, list | None):
        raise RecipeError(f"{problem}; `tools` beside them is a list", key=location)
    return Demonstration(messages, tools)


def get_batch_indices(step: int, batch_size: int, size: int, seed: int) -> list[int]:
    """The demonstrations of one step: passes over all of them, each in an order of its own."""
    first = step * batch_size
    orders: dict[int, Any] = {}
    chosen = []
    for place in range(first, first + batch_size):
        turn, offset = divmod(place, size)
        if turn not in orders:
            orders[turn] = np.random.default_rng((seed, turn)).permutation(size)
        chosen.append(int(orders[turn][offset]))
    return chosen


class ConversationTokenizer:
    """Turns conversations into rows with the model's own chat template.

    The prompt is tokenized apart from the reply, as it is when the model is sampled. The reply
    ends with the end-of-turn token; what the template writes after it is never sampled and is
    left out.
    """

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        self._template = ChatTemplate.from_model_dir(model_dir)
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._end = self._tokenizer.eos_token_id

    def build_rows(self, demonstrations: Sequence[Demonstration]) -> list[TrainingRow]:
        """One row per conversation; its last message is scored.

        Raises:
            RecipeError: The template rewrites the prompt once the reply is there.
        """
        render = self._template.render_prompt
        prompts = [render(one.messages[:-1], tools=one.tools) for one in demonstrations]
        wholes = [
            render(one.messages, tools=one.tools, opens_reply=False) for one in demonstrations
        ]
        for prompt, whole in zip(prompts, wholes, strict=True):
            if not whole.startswith(prompt):
                raise RecipeError(
                    "the chat template must keep the prompt as it is when a reply follows, "
                    f"got {prompt[-80:]!r} and then {whole[: len(prompt)][-80:]!r}",
                    key="model.path",
                    hint="use a template without a thinking preamble",
                )
        replies = [whole[len(prompt) :] for prompt, whole in zip(prompts, wholes, strict=True)]
        ids = self._tokenizer([*prompts, *replies], add_special_tokens=False)["input_ids"]
        half, rows = len(prompts), []
        for prompt, reply in zip(ids[:half], ids[half:], strict=True):
            if self._end in reply:
                reply = reply[: len(reply) - reply[::-1].index(self._end)]
            loss_mask = np.zeros(len(prompt) + len(reply), dtype=np.uint8)
            loss_mask[len(prompt) :] = 1
            rows.append(TrainingRow(np.array(prompt + reply, dtype=np.int32), loss_mask, {}))
        return rows
