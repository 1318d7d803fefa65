"""Interface of a dialect, as the routes use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec

from areal_hpc.errors import RequestError
from areal_hpc.proxy.completion.streaming import RecordedReply, ReplyStream
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.sessions.store import Session


class EventStream(ABC):
    """The server-sent events of a reply. What tells an end comes after its journal record."""

    def __init__(self, live: ReplyStream) -> None:
        self._live = live

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes: ...

    def abandon(self) -> None:
        """The client has gone."""
        self._live.abandon()

    @abstractmethod
    def broken(self, refusal: RequestError) -> bytes:
        """What says that the stream ends early."""


class Exchange(Protocol):
    """A request that has been understood, and how it is answered."""

    @property
    def call(self) -> ModelCall:
        """What is asked of the model."""

    @property
    def answer_id(self) -> str:
        """Id of the reply and of its first interaction."""

    @property
    def streams(self) -> bool:
        """The client reads while the model speaks."""

    def whole(self, answers: Sequence[RecordedReply]) -> bytes:
        """The reply's body."""

    def events(self, live: ReplyStream) -> EventStream:
        """The reply as it comes."""


FormatError = Callable[[RequestError], bytes]
"""The body of an error."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of talking to the model."""

    request: type[msgspec.Struct]
    """The body of a request."""
    read: Callable[[bytes, Session, ServedModel], Exchange]
    """Raises `RequestError`: 400, naming the parameter that is wrong or cannot be honoured."""
    refused: FormatError


def format_named_event(content: dict[str, Any]) -> bytes:
    """One server-sent event under the name that is its `type`."""
    name: str = content["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
