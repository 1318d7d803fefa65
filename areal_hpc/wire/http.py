"""One JSON call over HTTP or HTTPS: msgspec in, msgspec out, errors with a name."""

import ssl
import time
from typing import TypeVar

import aiohttp
import httpx
import msgspec

from areal_hpc.errors import ClusterError, HttpStatusError
from areal_hpc.wire.backoff import Backoff

ReplyT = TypeVar("ReplyT")
SERVER_KEEP_ALIVE_S = 75
"""For which servers keep an idle connection. Clients must give up theirs earlier (httpx after 5 s,
aiohttp after 15), or a request meets the closing of its connection."""
RETRYABLE_STATUSES = frozenset({408, 429, 502, 503, 504})
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


class WireClient:
    """Blocking JSON calls, retried until a deadline while the peer is away.

    `base_url` is empty for a peer that moves: each route is then a whole URL. `key` is sent as a
    bearer key, and may be left to each call; `tls` is for peers on other nodes.
    """

    def __init__(
        self,
        base_url: str,
        key: str = "",
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._base_url = base_url
        self._key = key
        self._client = httpx.Client(timeout=timeout_s, trust_env=False, verify=tls or False)

    def call(
        self,
        route: str,
        request: msgspec.Struct | None,
        reply: type[ReplyT],
        *,
        key: str = "",
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
        headers = _build_key_header(key or self._key)
        limit = timeout_s or self._client.timeout
        give_up_at = time.monotonic() + retry_time_s
        pauses = iter(BACKOFF)
        while True:
            try:
                answer = self._client.request(
                    method, url, content=body, headers=headers, timeout=limit
                )
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
        self,
        base_url: str,
        key: str = "",
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._key = key
        self._tls = tls
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None  # needs a running loop

    async def call(
        self,
        route: str,
        request: msgspec.Struct | None,
        reply: type[ReplyT],
        *,
        key: str = "",
        timeout_s: float | None = None,
    ) -> ReplyT:
        """POST `request` once, or GET where there is none, and decode the reply.

        `key` goes in place of the client's own; `timeout_s` limits this call.
        """
        method, body = _build_method_and_body(request)
        url = f"{self._base_url}{route}"
        headers = _build_key_header(key or self._key)
        limit = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls or False)
            )
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=limit
            ) as answer:
                status, content = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ClusterError(f"{url} is unreachable ({reason})") from error
        return _decode_answer(status, url, content, reply)

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
