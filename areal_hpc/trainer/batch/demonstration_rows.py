"""Training rows of demonstrations: their tokens as sampling would see them, and what is learned.

A conversation is one row if each reply follows what the template wrote before it. A template may
rewrite what came earlier, such as by removing the reasoning of turns that are over. Then the reply
begins another row, with the conversation as the template writes it up to that reply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.dataset.demonstrations import Demonstration
from areal_hpc.errors import ChatTemplateError, RecipeError
from areal_hpc.session.chat_template import ChatTemplate, Message, TokenEncoder, read_json
from areal_hpc.trainer.batch.packing import TrainingRow

TextRange = tuple[int, int]
PROBE_CODES = range(0xE000, 0xF900)
"""Private code points; the first that a text lacks is a reply that differs from the text's own."""


@dataclass(slots=True)
class _WrittenRow:
    """Text of a row, in pieces that are tokenized one by one, as in sampling."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """Texts, and whether they are learned."""
    text: str = ""
    """Beginning of every rendering that continues this row."""

    def append(self, text: str, learned: Sequence[TextRange]) -> None:
        """Append what `text` adds to the row, up to the end of what is learned in it."""
        at = len(self.text)
        for start, end in learned:
            self.pieces += [(text[at:start], False), (text[start:end], True)]
            at = end
        self.text = text[:at]


class DemonstrationTokenizer:
    """Tokenizer of demonstrations with the model's own chat template.

    The learned part of a reply ends with the token that ends its turn. A template's own
    `{% generation %}` blocks take precedence.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._encoder = TokenEncoder.from_model_dir(model_dir)
        self._special_ids = frozenset(self._encoder.list_special_token_ids())

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.from_model_dir(self._model_dir)

    def build_rows(self, demonstrations: Sequence[Demonstration]) -> list[TrainingRow]:
        """Build the rows of demonstrations, at least one of each.

        Raises:
            RecipeError: The template refuses a conversation, or marks nothing of it as learned.
        """
        rows = []
        for demonstration in demonstrations:
            try:
                written = self._write_rows(demonstration)
            except ChatTemplateError as error:
                raise RecipeError(
                    f"the model's chat template refuses this demonstration: {error}",
                    key=demonstration.location,
                    hint="remove it, or use a template that takes such conversations",
                ) from error
            if not written:
                raise RecipeError(
                    "the chat template marks nothing of this demonstration as generated",
                    key=demonstration.location,
                    hint="correct the {% generation %} blocks of the template, or remove them",
                )
            rows += [self._encode_pieces(row.pieces) for row in written]
        return rows

    def _write_rows(self, demonstration: Demonstration) -> list[_WrittenRow]:
        if demonstration.plain_text is not None:
            return [self._write_plain_text(*demonstration.plain_text)]
        rows: list[_WrittenRow] = []
        for index, message in enumerate(demonstration.messages):
            if message["role"] != "assistant" or index < demonstration.first_learned:
                continue
            text, learned = self._render_reply(demonstration, index)
            if not learned:
                continue
            if not rows or not text.startswith(rows[-1].text):
                rows.append(_WrittenRow())
            rows[-1].append(text, learned)
            last, within = self._template.changing_turn_end
            if last and rows[-1].text.endswith(last):
                rows[-1].text = rows[-1].text.removesuffix(last) + within
        return rows

    def _write_plain_text(self, prompt: str, completion: str) -> _WrittenRow:
        end = read_json(self._model_dir / "tokenizer_config.json").get("eos_token") or ""
        end = end["content"] if isinstance(end, dict) else end
        lead = self._encoder.decode(self._encoder.encode("", add_special_tokens=True))
        return _WrittenRow([(lead + prompt, False), (completion.removesuffix(end) + end, True)])

    def _render_reply(
        self, demonstration: Demonstration, index: int
    ) -> tuple[str, list[TextRange]]:
        """Render the conversation up to a reply; return what of the text is learned."""
        template, tools = self._template, demonstration.tools
        before: Sequence[Message] = demonstration.messages[:index]
        text, marked = template.render_marked(demonstration.messages[: index + 1], tools=tools)
        if template.marks_replies:
            return text, marked[len(template.render_marked(before, tools=tools)[1]) :]
        prompt = template.render_prompt(before, tools=tools)
        start = (
            len(prompt)
            if text.startswith(prompt)
            else self._find_rewritten_reply(text, prompt, before, tools)
        )
        ended = text.rstrip()
        last_ids = self._encoder.encode(ended[start:])[-1:]
        is_end = bool(last_ids) and last_ids[0] in self._special_ids
        return text, [(start, len(ended) if is_end else len(text))]

    def _find_rewritten_reply(
        self,
        text: str,
        prompt: str,
        before: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> int:
        """Find where the reply begins in a text that does not begin with the reply's prompt.

        The text with another reply is equal up to there.
        """
        render = partial(self._template.render_prompt, tools=tools, opens_reply=False)
        probe = next(char for char in map(chr, PROBE_CODES) if char not in text)
        other = render([*before, {"role": "assistant", "content": probe}])
        shared = _count_common_chars(text, other)
        history = render(before)
        opening = prompt.removeprefix(history)
        found = text.rfind(opening, _count_common_chars(text, history), shared)
        return found + len(opening) if found >= 0 else shared

    def _encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> TrainingRow:
        ids: list[int] = []
        mask: list[int] = []
        for text, is_learned in pieces:
            encoded = self._encoder.encode(text)
            ids += encoded
            mask += [int(is_learned)] * len(encoded)
        return TrainingRow(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8), {})


def _count_common_chars(text: str, other: str) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (char, own) in pairs if char != own), min(len(text), len(other)))
