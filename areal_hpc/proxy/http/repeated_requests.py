"""Requests that say that they repeat another: they get its answer, or take its place.

Two equal requests are two samples. SDKs count their retries in a header, and an idempotency key is
the client's own name for a request, whatever became of it.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.http.event_stream import Headers
from areal_hpc.proxy.sessions.store import Session

RETRY_COUNT_HEADER, IDEMPOTENCY_KEY_HEADER = b"x-stainless-retry-count", b"idempotency-key"
MAX_KEPT_ANSWER_BYTES_PER_SESSION = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer."""

    content: bytes
    content_type: str
    headers: Headers
    is_sent: bool = False
    """It was streamed: the client has it."""


@dataclass(slots=True)
class NamedRequest:
    """A request by its idempotency key; those of one key are answered in turn."""

    body_digest: bytes
    tries: int = 0
    answer: Answer | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class NamedRequests:
    """Requests of each session that have an idempotency key, with the newest answers."""

    def __init__(self) -> None:
        self._by_session: WeakKeyDictionary[Session, dict[bytes, NamedRequest]] = (
            WeakKeyDictionary()
        )

    def find(
        self, session: Session | None, headers: Mapping[bytes, bytes], body: bytes
    ) -> NamedRequest | None:
        """The request of a key; None where there is no key.

        Raises:
            ProxyRequestError: 400: the key was another request's.
        """
        key, digest = headers.get(IDEMPOTENCY_KEY_HEADER, b""), hashlib.blake2b(body).digest()
        if session is None or not key:
            return None
        known = self._by_session.setdefault(session, {})
        request = known.setdefault(key, NamedRequest(digest))
        if request.body_digest != digest:
            problem = "this Idempotency-Key was another request's"
            raise ProxyRequestError(400, problem, hint="give each request a key of its own")
        _drop_oldest_answers(known)
        return request


def _drop_oldest_answers(known: dict[bytes, NamedRequest]) -> None:
    total = sum(len(one.answer.content) for one in known.values() if one.answer)
    for key, one in [*known.items()]:
        if total <= MAX_KEPT_ANSWER_BYTES_PER_SESSION:
            return
        if one.answer is not None:
            total -= len(one.answer.content)
            del known[key]


def is_counted_retry(headers: Mapping[bytes, bytes]) -> bool:
    """True if the client's SDK says that it sends a request once more."""
    return headers.get(RETRY_COUNT_HEADER, b"0").strip() not in (b"", b"0")
