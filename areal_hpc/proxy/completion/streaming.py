"""Streamed replies: deltas while generating, then the recorded reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import ReplyContent
from areal_hpc.session.tree import Interaction


class RecordedChoice(msgspec.Struct, frozen=True):
    choice: int
    interaction: Interaction
    generation: Generation
    said: ReplyContent

    @property
    def finish_reason(self) -> str:
        reason = self.generation.finish_reason
        return "tool_calls" if reason == "stop" and self.said.calls else reason


class ReplyChunk(msgspec.Struct, frozen=True):
    choice: int
    said: ReplyContent
    piece: TokenChunk
    """The tokens that came with it; those of text held back come early, never late."""


@dataclass(slots=True)
class ReplyStream:
    """The choices of one streamed call, in the order in which things happen.

    Iterating gives chunks, then a `RecordedChoice` for each choice; it raises what broke a choice.
    """

    choices: int
    prompt_tokens: int = 0
    abandoned: bool = False
    _happened: asyncio.Queue[ReplyChunk | RecordedChoice | Exception] = field(
        default_factory=asyncio.Queue
    )
    _stops: dict[int, Callable[[], None]] = field(default_factory=dict)
    _ended: int = 0

    def put(self, event: ReplyChunk | RecordedChoice | Exception) -> None:
        self._happened.put_nowait(event)

    def __aiter__(self) -> ReplyStream:
        return self

    async def __anext__(self) -> ReplyChunk | RecordedChoice:
        if self._ended == self.choices:
            raise StopAsyncIteration
        event = await self._happened.get()
        if isinstance(event, Exception):
            raise event
        self._ended += isinstance(event, RecordedChoice)
        return event

    def stop_generation(self) -> None:
        self.abandoned = True
        for stop in self._stops.values():
            stop()

    def register_stop_callback(self, choice_index: int, stop: Callable[[], None]) -> None:
        self._stops[choice_index] = stop
        if self.abandoned:
            stop()

    def unregister_stop_callback(self, choice_index: int) -> None:
        self._stops.pop(choice_index, None)
