"""Interface of a dialect, as the routes use it."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.streaming import RecordedChoice, ReplyStream
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.random_ids import make_random_id
from areal_hpc.proxy.sessions.store import Session


class Exchange(ABC):
    """A request that has been understood, and how it is answered."""

    stream_media_type: str = "text/event-stream"
    ping_event: ClassVar[bytes] = b": ping\n\n"
    """Sent in a long silence; at least a comment."""

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
        """Server-sent events of the reply. What tells an end comes after its journal record."""

    def format_ping(self) -> bytes:
        return self.ping_event

    @abstractmethod
    def format_error_event(self, refusal: ProxyRequestError) -> bytes:
        pass


ErrorFormatter = Callable[[ProxyRequestError], bytes]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of talking to the model."""

    request: type[msgspec.Struct]
    read: Callable[[Any, Session, ServedModel], Exchange]
    """Raises `ProxyRequestError`: 400, naming the parameter that is wrong or cannot be honored."""
    error_formatter: ErrorFormatter


def format_named_event(content: dict[str, Any]) -> bytes:
    name: str = content["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
