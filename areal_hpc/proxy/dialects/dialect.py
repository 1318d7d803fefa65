"""Interface of a dialect to the routes, and the division of a reply into blocks."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.reply import RecordedChoice, ReplyStream
from areal_hpc.proxy.engine.model_call import (
    ModelCall,
    ReplyContent,
    ServedModel,
    make_random_id,
)
from areal_hpc.proxy.sessions.store import Session


class Exchange(ABC):
    """Decoded request of a dialect, which formats its answer."""

    stream_media_type: str = "text/event-stream"
    ping_event: ClassVar[bytes] = b": ping\n\n"
    """Event for a long silence; at least a comment."""

    def __init__(
        self, call: ModelCall, model: ServedModel, id_prefix: str, streams: bool | None
    ) -> None:
        self.call = call
        self.model = model
        self.answer_id = id_prefix + make_random_id(14)
        self.streams = bool(streams)
        self.created_at = int(time.time())

    @abstractmethod
    def format_reply(self, answers: Sequence[RecordedChoice]) -> bytes:
        pass

    @abstractmethod
    def stream_events(self, reply_stream: ReplyStream) -> AsyncGenerator[bytes, None]:
        """Yield the reply's server-sent events; that of an end comes after its journal record."""

    def format_ping(self) -> bytes:
        return self.ping_event

    @abstractmethod
    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        pass


ErrorFormatter = Callable[[ProxyRequestError], bytes]


@dataclass(frozen=True, slots=True)
class Dialect:
    request: type[msgspec.Struct]
    read: Callable[[Any, Session, ServedModel], Exchange]
    """Builder of the exchange. It raises `ProxyRequestError` 400 with the name of a parameter that
    is wrong or cannot be honored."""
    error_formatter: ErrorFormatter


def format_named_event(content: dict[str, Any]) -> bytes:
    name: str = content["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class ContentBlock:
    index: int
    kind: BlockKind
    text: str = ""
    """Text; of a call its arguments, JSON as the model wrote it."""
    name: str = ""
    """Name of the called tool."""
    call_id: str = ""


BlockChange = tuple[Literal["begin", "add", "end"], ContentBlock, str]
"""Change of a block, with the text that `add` appends."""


class BlockSplitter:
    """Incremental division of a reply into blocks: reasoning, text, then one for each call.

    Beside calls, white space alone makes no text block. Without text or calls the text is empty.
    """

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._held = ""
        """Leading white space that is held back."""

    def add_delta(self, delta: ReplyContent) -> Iterator[BlockChange]:
        if delta.reasoning:
            yield from self._extend_block("reasoning", delta.reasoning)
        if delta.text:
            text, self._held = self._held + delta.text, ""
            if text.strip() or (self._open is not None and self._open.kind == "text"):
                yield from self._extend_block("text", text)
            else:
                self._held = text
        for call in delta.calls:
            self._held = ""
            yield from self._extend_block("call", call.arguments, call.name, call.call_id)

    def finish(self) -> Iterator[BlockChange]:
        if all(block.kind == "reasoning" for block in self.blocks):
            yield from self._extend_block("text", self._held)
        if self._open is not None:
            yield "end", self._open, ""

    def _extend_block(
        self, kind: BlockKind, text: str, tool_name: str = "", call_id: str = ""
    ) -> Iterator[BlockChange]:
        block = self._open
        if block is None or block.kind != kind or call_id:  # the first part of a call has its id
            if block is not None:
                yield "end", block, ""
            block = self._open = ContentBlock(len(self.blocks), kind, "", tool_name, call_id)
            self.blocks.append(block)
            yield "begin", block, ""
        if text:
            block.text += text
            yield "add", block, text


def split_into_blocks(reply: ReplyContent) -> list[ContentBlock]:
    splitter = BlockSplitter()
    for _ in (*splitter.add_delta(reply), *splitter.finish()):
        pass
    return splitter.blocks
