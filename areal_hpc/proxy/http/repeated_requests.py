"""Requests that say that they repeat another: they get its answer, or take its place.

Two equal requests are two samples. SDKs count their retries in a header, and an idempotency key is
the client's own name for a request, whatever became of it. A request that was refused left nothing
behind, so that the next try of it is none.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.http.event_stream import Headers

RETRY_COUNT_HEADER, IDEMPOTENCY_KEY_HEADER = b"x-stainless-retry-count", b"idempotency-key"
MAX_KEPT_ANSWER_BYTES_PER_SESSION = 1 << 20
MAX_KEPT_REQUESTS_PER_SESSION = 1024
"""Of the newest keys, and as many refusals."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer."""

    content: bytes
    content_type: str
    headers: Headers
    is_sent: bool = False
    """It was streamed: the client has it."""
    is_whole: bool = True
    """No error ended its stream."""


@dataclass(slots=True)
class NamedRequest:
    """A request by its idempotency key; those of one key are answered in turn."""

    digest: bytes
    was_answered: bool = False
    answer: Answer | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionRequests:
    """The newest requests of a session that have an idempotency key, or were refused."""

    def __init__(self) -> None:
        self._named: dict[bytes, NamedRequest] = {}
        self._refused: dict[bytes, None] = {}

    def find_named(
        self, headers: Mapping[bytes, bytes], compute_digest: Callable[[], bytes]
    ) -> NamedRequest | None:
        """The request of a key; None where there is no key.

        Raises:
            ProxyRequestError: 400: the key was another request's.
        """
        key = headers.get(IDEMPOTENCY_KEY_HEADER, b"")
        if not key:
            return None
        digest = compute_digest()
        request = self._named.setdefault(hashlib.blake2b(key).digest(), NamedRequest(digest))
        if request.digest != digest:
            problem = "this Idempotency-Key was another request's"
            raise ProxyRequestError(400, problem, hint="give each request a key of its own")
        self._drop_oldest()
        return request

    def is_retry(
        self,
        headers: Mapping[bytes, bytes],
        named: NamedRequest | None,
        compute_digest: Callable[[], bytes],
    ) -> bool:
        """True if a request says that it repeats one, and that one was not refused."""
        repeats = headers.get(RETRY_COUNT_HEADER, b"0").strip() not in (b"", b"0")
        if not repeats and (named is None or not named.was_answered):
            return False
        digest = compute_digest()
        was_refused = digest in self._refused
        self._refused.pop(digest, None)
        return not was_refused

    def note_refusal(self, digest: bytes) -> None:
        """Remember that a request was refused, or its stream broke."""
        self._refused[digest] = None
        while len(self._refused) > MAX_KEPT_REQUESTS_PER_SESSION:
            del self._refused[next(iter(self._refused))]

    def keep_answer(self, request: NamedRequest, answer: Answer) -> None:
        """Keep the answer of a named request, in place of the oldest ones if there are many."""
        request.answer = answer
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        kept_bytes = sum(len(one.answer.content) for one in self._named.values() if one.answer)
        for key, one in [*self._named.items()]:
            if (
                kept_bytes <= MAX_KEPT_ANSWER_BYTES_PER_SESSION
                and len(self._named) <= MAX_KEPT_REQUESTS_PER_SESSION
            ):
                return
            if not one.lock.locked():
                kept_bytes -= len(one.answer.content) if one.answer else 0
                del self._named[key]


def hash_request(path: str, query: bytes, body: bytes) -> bytes:
    """The digest by which a request is known again."""
    digest = hashlib.blake2b(path.encode() + b"?" + query + b"\0")
    digest.update(body)
    return digest.digest()
