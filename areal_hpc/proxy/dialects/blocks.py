"""A reply as a sequence of blocks: what Anthropic calls content blocks, OpenAI output items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areal_hpc.proxy.engine.reply import ReplyDelta, ToolCallDelta


@dataclass(slots=True)
class ContentBlock:
    """A part of a reply that stands by itself."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    """For a call, its arguments: JSON as the model wrote it."""
    name: str = ""
    """The tool that is called."""
    call_id: str = ""


BlockChange = tuple[Literal["begin", "add", "end"], ContentBlock, str]
"""What happens to a block; the text is what `add` appends."""


class BlockReader:
    """Cuts a reply into blocks as it comes: reasoning, text, then one for each call.

    White space alone is no text next to calls. A reply without text or calls has an empty text.
    """

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._held = ""
        """White space before any text."""

    def feed(self, said: ReplyDelta) -> Iterator[BlockChange]:
        """What the next part changes."""
        if said.reasoning:
            yield from self._extend("reasoning", said.reasoning)
        if said.text:
            text = self._held + said.text
            if text.strip() or (self._open is not None and self._open.kind == "text"):
                self._held = ""
                yield from self._extend("text", text)
            else:
                self._held = text
        for call in said.calls:
            self._held = ""
            yield from self._call(call)

    def finish(self) -> Iterator[BlockChange]:
        """What the end changes."""
        if all(block.kind == "reasoning" for block in self.blocks):
            yield from self._extend("text", self._held)
        yield from self._close()

    def _extend(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[BlockChange]:
        block = self._open
        if block is None or block.kind != kind:
            yield from self._close()
            block = ContentBlock(len(self.blocks), kind)
            yield from self._begin(block)
        yield from self._add(block, text)

    def _call(self, call: ToolCallDelta) -> Iterator[BlockChange]:
        block = self._open
        if block is None or call.call_id:  # the first part of a call has its id
            yield from self._close()
            block = ContentBlock(len(self.blocks), "call", "", call.name, call.call_id)
            yield from self._begin(block)
        yield from self._add(block, call.arguments)

    def _begin(self, block: ContentBlock) -> Iterator[BlockChange]:
        self.blocks.append(block)
        self._open = block
        yield "begin", block, ""

    def _add(self, block: ContentBlock, text: str) -> Iterator[BlockChange]:
        if text:
            block.text += text
            yield "add", block, text

    def _close(self) -> Iterator[BlockChange]:
        if self._open is not None:
            yield "end", self._open, ""
            self._open = None


def split_into_blocks(said: ReplyDelta) -> list[ContentBlock]:
    """The blocks of a whole reply."""
    reader = BlockReader()
    for _ in reader.feed(said):
        pass
    for _ in reader.finish():
        pass
    return reader.blocks
