"""Repeated requests: answers by idempotency key, and the detection of retries.

Two equal requests are two samples, unless the client marks one as a repetition: SDKs count retries
in a header, and an idempotency key names a request. A refused request has recorded nothing, so its
next try does not count as a retry.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from areal_hpc.errors import ClientDisconnectedError, ProxyRequestError
from areal_hpc.proxy.http.event_stream import Headers

RETRY_COUNT_HEADER, IDEMPOTENCY_KEY_HEADER = b"x-stainless-retry-count", b"idempotency-key"
MAX_KEPT_ANSWER_BYTES_PER_SESSION = 1 << 20
MAX_KEPT_REQUESTS_PER_SESSION = 1024
"""Newest idempotency keys that are kept, and as many digests of refused requests."""


@dataclass(frozen=True, slots=True)
class Answer:
    content: bytes
    content_type: str
    headers: Headers
    is_sent: bool = False
    """Whether it was streamed, so that the client has it."""
    is_whole: bool = True
    """Whether its stream, if any, ended without an error."""


@dataclass(slots=True)
class _NamedRequest:
    digest: bytes
    answer: Answer | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionRequests:
    """Newest requests of a session that have an idempotency key, or were refused."""

    def __init__(self) -> None:
        self._named: dict[bytes, _NamedRequest] = {}
        self._refused: dict[bytes, None] = {}

    async def answer_once(
        self,
        headers: Mapping[bytes, bytes],
        compute_digest: Callable[[], bytes],
        answer: Callable[[bool, bool], Awaitable[Answer]],
    ) -> Answer:
        """Answer a request, or return the answer that was given under its idempotency key.

        `answer` gets two arguments: whether the request is a retry of one that was not refused, and
        whether to keep its content. The digest identifies a request; it is computed only if needed,
        because that takes time in proportion to the body.
        """
        key = headers.get(IDEMPOTENCY_KEY_HEADER, b"")
        is_retry = headers.get(RETRY_COUNT_HEADER, b"0").strip() not in (b"", b"0")
        named = None
        if key:
            name, digest = hashlib.blake2b(key).digest(), compute_digest()
            is_retry |= name in self._named
            named = self._named.setdefault(name, _NamedRequest(digest))
            self._drop_oldest_names()
            if named.digest != digest:
                problem = "this Idempotency-Key was another request's"
                raise ProxyRequestError(400, problem, hint="give each request a key of its own")
        async with named.lock if named else contextlib.nullcontext():
            if named and named.answer is not None:
                return named.answer
            if is_retry and (digest := compute_digest()) in self._refused:
                del self._refused[digest]
                is_retry = False
            is_whole = False
            try:
                result = await answer(is_retry, named is not None)
                is_whole = result.is_whole
            except ClientDisconnectedError:  # perhaps after the reply was recorded
                is_whole = True
                raise
            finally:
                if not is_whole:
                    self._refused[compute_digest()] = None
                    while len(self._refused) > MAX_KEPT_REQUESTS_PER_SESSION:
                        del self._refused[next(iter(self._refused))]
            if named and is_whole:
                named.answer = replace(result, is_sent=False)
                self._drop_oldest_names()
        return result

    def _drop_oldest_names(self) -> None:
        kept_bytes = sum(len(r.answer.content) for r in self._named.values() if r.answer)
        for name, request in [*self._named.items()]:
            if (
                kept_bytes <= MAX_KEPT_ANSWER_BYTES_PER_SESSION
                and len(self._named) <= MAX_KEPT_REQUESTS_PER_SESSION
            ):
                return
            if not request.lock.locked():
                kept_bytes -= len(request.answer.content) if request.answer else 0
                del self._named[name]


def hash_request(path: str, query: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(path.encode() + b"?" + query + b"\0")
    digest.update(body)
    return digest.digest()
