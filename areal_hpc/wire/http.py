"""One JSON call over HTTP: msgspec in, msgspec out, errors with a name."""

import time
from collections.abc import Generator
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import httpx
import msgspec

from areal_hpc.errors import ClusterError, HttpStatusError
from areal_hpc.wire.backoff import Backoff
from areal_hpc.wire.signing import CLOCK_SKEW_STATUS, RequestSigner

ReplyT = TypeVar("ReplyT")
SERVER_KEEP_ALIVE_S = 75
"""For which servers keep an idle connection. Clients must give up theirs earlier (httpx after 5 s,
aiohttp after 15), or a request meets the closing of its connection."""
RETRYABLE_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
BACKOFF = Backoff(0.05, 1.0)
"""Pauses between the tries of a call."""


def responds_with_200(method: str, url: str, timeout_s: float, *, key: str = "") -> bool:
    """True if a server of this machine says 200; false if it is away, or silent for `timeout_s`."""
    try:
        with httpx.stream(
            method,
            url,
            content=b"{}" if method == "POST" else None,
            headers={"Content-Type": "application/json"} | _build_key_header(key),
            timeout=timeout_s,
            trust_env=False,
            verify=False,  # no certificate is asked for, and reading those of the system takes long
        ) as answer:
            return answer.status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _build_key_header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class SignedAuth(httpx.Auth):
    """Signs each request of an httpx client, and once more if it came too late."""

    requires_request_body = True

    def __init__(self, signer: RequestSigner) -> None:
        self._signer = signer

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Sign, send, and repeat if need be."""
        for _ in range(2):
            target = request.url.raw_path.decode("ascii")
            signature = self._signer.sign(request.method, target, request.content)
            request.headers["Authorization"] = signature
            answer = yield request
            if answer.status_code != CLOCK_SKEW_STATUS:
                return


class WireClient:
    """Blocking JSON calls, retried until a deadline while the peer is away.

    `base_url` is empty for a peer that moves: each route is then a whole URL. `signer` may be left
    to each call.
    """

    def __init__(
        self, base_url: str, signer: RequestSigner | None = None, *, timeout_s: float = 30.0
    ) -> None:
        self._base_url = base_url
        self._auth = SignedAuth(signer) if signer else None
        self._client = httpx.Client(timeout=timeout_s, trust_env=False)

    def call(
        self,
        route: str,
        request: msgspec.Struct | None,
        reply: type[ReplyT],
        *,
        signer: RequestSigner | None = None,
        retry_time_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> ReplyT:
        """POST `request`, or GET where there is none, and decode the reply.

        The call is repeated for `retry_time_s` while the peer refuses connections or is busy;
        `timeout_s` limits one try (the client's own limit when None).

        Raises:
            HttpStatusError: The peer answered with an error that repeating will not fix.
            ClusterError: The peer could not be reached in time.
        """
        url = f"{self._base_url}{route}"
        method, body = _build_method_and_body(request)
        auth = SignedAuth(signer) if signer else self._auth
        limit = timeout_s or self._client.timeout
        give_up_at = time.monotonic() + retry_time_s
        pauses = iter(BACKOFF)
        while True:
            try:
                answer = self._client.request(method, url, content=body, auth=auth, timeout=limit)
                if answer.status_code not in RETRYABLE_STATUSES:
                    return _decode_answer(answer.status_code, url, answer.content, reply)
                trouble = f"answered {answer.status_code}: {answer.text[:200]}"
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() >= give_up_at:
                waited = f" for {retry_time_s:g} s" if retry_time_s else ""
                raise ClusterError(
                    f"{url} has not responded{waited} ({trouble})",
                    hint="read that role's log in logs/latest",
                )
            time.sleep(next(pauses))

    def close(self) -> None:
        self._client.close()


class AsyncWireClient:
    """Client for event loops, on one aiohttp session; each call is made once."""

    def __init__(
        self, base_url: str, signer: RequestSigner | None = None, *, timeout_s: float = 30.0
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._signer = signer
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None  # needs a running loop

    async def call(
        self,
        route: str,
        request: msgspec.Struct | None,
        reply: type[ReplyT],
        *,
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> ReplyT:
        """POST `request` once, or GET where there is none, and decode the reply.

        A session's `key` goes in place of a signature; `timeout_s` limits this call.
        """
        method, body = _build_method_and_body(request)
        url = f"{self._base_url}{route}"
        limit = timeout_s or self._timeout_s
        status, content = await self._request(method, url, body, key, limit)
        if status == CLOCK_SKEW_STATUS:
            status, content = await self._request(method, url, body, key, limit)
        return _decode_answer(status, url, content, reply)

    async def _request(
        self, method: str, url: str, body: bytes | None, key: str | None, timeout_s: float
    ) -> tuple[int, bytes]:
        headers = _build_key_header(key or "")
        if not key and self._signer is not None:
            place = urlsplit(url)
            target = f"{place.path or '/'}{'?' if place.query else ''}{place.query}"
            headers = {"Authorization": self._signer.sign(method, target, body)}
        limit = aiohttp.ClientTimeout(total=timeout_s)
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=limit
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ClusterError(f"{url} is unreachable ({reason})") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _build_method_and_body(request: msgspec.Struct | None) -> tuple[str, bytes | None]:
    return ("GET", None) if request is None else ("POST", msgspec.json.encode(request))


def _decode_answer(status_code: int, url: str, content: bytes, reply: type[ReplyT]) -> ReplyT:
    if status_code >= 400:
        raise HttpStatusError(status_code, url, content.decode(errors="replace"))
    try:
        return msgspec.json.decode(content, type=reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"{url} answered what is no {reply.__name__} ({error}): {content[:200]!r}",
            hint="another program may have its port by now; read that role's log in logs/latest",
        ) from error
