"""What a dialect is to the routes that serve it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from areal_hpc.proxy.live import Answer, LiveAnswers
from areal_hpc.proxy.model_call import ModelCall, ServedModel
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.sessions import Session


class EventStream(Protocol):
    """Server-sent events on their way."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes: ...

    def abandon(self) -> None:
        """The client has gone."""

    def broken(self, refusal: RequestRefused) -> bytes:
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

    def whole(self, answers: Sequence[Answer]) -> bytes:
        """The reply's body."""

    def events(self, live: LiveAnswers) -> EventStream:
        """The reply as it comes. An end is told after its interaction is in the journal."""


Refused = Callable[[RequestRefused], bytes]
"""The body of an error."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of talking to the model."""

    request: type[msgspec.Struct]
    """The body of a request."""
    read: Callable[[bytes, Session, ServedModel], Exchange]
    """Raises `RequestRefused`: 400, naming the parameter that is wrong or cannot be honoured."""
    refused: Refused
