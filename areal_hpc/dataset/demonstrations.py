"""Demonstrations for supervised fine-tuning: rows of chat data, read and checked."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.session.chat_template import Message
from areal_hpc.session.message_matching import normalize_chat_message, write_json_text

EXPECTED_FORM = (
    "a demonstration has `messages`, or `prompt` and `completion` (two lists of messages, or two "
    "texts), and at least one message of the role assistant to learn"
)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Conversation in normal form, or a text that continues another."""

    messages: Sequence[Message] = ()
    tools: list[dict[str, Any]] | None = None
    """Schemas of the tools that the prompt shows."""
    first_learned: int = 0
    """Index of the first message after the prompt: the assistant's from there on are learned."""
    plain_text: tuple[str, str] | None = None
    """Prompt and completion, which no chat template renders; None for a conversation."""
    location: str = field(default="", compare=False)
    """Where it was read, for errors."""

    def list_texts(self) -> Iterator[str]:
        """List its texts, from which a tiny model's tokenizer is trained."""
        yield from self.plain_text or ()
        for message in self.messages:
            yield message["content"]
            for call in message.get("tool_calls", ()):
                yield write_json_text(call["function"]["arguments"])


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Read a file of JSON lines that `parse_demonstration` has checked."""
    with path.open() as stream:
        return [
            parse_demonstration(json.loads(line), f"{path}:{number}")
            for number, line in enumerate(stream, 1)
        ]


def parse_demonstration(row: Mapping[str, Any], location: str = "messages") -> Demonstration:
    """Parse a row of a data set; columns that are null count as absent.

    Raises:
        RecipeError: The row is no demonstration.
    """
    try:
        demonstration = _parse(row, location)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RecipeError(f"{EXPECTED_FORM}: {error!r}", key=location) from error
    learned = demonstration.messages[demonstration.first_learned :]
    has_reply = any(message["role"] == "assistant" for message in learned)
    if not has_reply and demonstration.plain_text is None:
        roles = ", ".join(message["role"] for message in learned) or "none"
        raise RecipeError(f"{EXPECTED_FORM}: got messages of the roles {roles}", key=location)
    return demonstration


def _parse(row: Mapping[str, Any], location: str) -> Demonstration:
    tools = row.get("tools") or None
    if isinstance(tools, str):  # a column of a table holds schemas of many shapes as JSON
        tools = json.loads(tools) or None
    if not isinstance(tools, list | None):
        raise TypeError(f"`tools` is a {type(tools).__name__}, expected a list")
    messages = row.get("messages")
    prompt: Any = ()
    if messages is None:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Demonstration(plain_text=(prompt, completion), location=location)
        messages = [*prompt, *completion]
    normal = [normalize_chat_message(message) for message in messages]
    return Demonstration(normal, tools, len(prompt), location=location)
