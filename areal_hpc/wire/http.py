"""Clients that send and receive msgspec structs as JSON over HTTP or HTTPS, with typed errors."""

import ssl
from typing import TypeVar

import aiohttp
import httpx
import msgspec

from areal_hpc.errors import ClusterError, HttpStatusError
from areal_hpc.wire.decoding import decode_json

ReplyT = TypeVar("ReplyT")
SERVER_KEEP_ALIVE_S = 75
"""Time for which servers keep an idle connection. Clients must close theirs earlier (httpx does
after 5 s, aiohttp after 15), or a server closes a connection while a request is sent on it."""


def responds_with_200(method: str, url: str, timeout_s: float, *, key: str = "") -> bool:
    """Return whether a server of this machine responds with status 200 within `timeout_s`."""
    try:
        with httpx.stream(
            method,
            url,
            content=b"{}" if method == "POST" else None,
            headers={"Content-Type": "application/json"} | build_key_header(key),
            timeout=timeout_s,
            trust_env=False,
            verify=False,  # the URL is plain HTTP, and reading the system's certificates takes long
        ) as answer:
            return answer.status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def build_key_header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class WireClient:
    """Blocking client of JSON calls, which sends each call once.

    `base_url` is empty for a peer whose address changes: each route is then a whole URL. `key` is
    sent as a bearer key, and may be left to each call; `tls` is for peers on other nodes.
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
        timeout_s: float | None = None,
    ) -> ReplyT:
        """POST `request`, or GET without one, and decode the reply.

        Raises:
            HttpStatusError: The peer responded with an error status.
            ClusterError: The peer could not be reached within `timeout_s`, or the client's limit.
        """
        url = f"{self._base_url}{route}"
        method, body = _encode_request(request)
        headers = build_key_header(key or self._key)
        try:
            answer = self._client.request(
                method,
                url,
                content=body,
                headers=headers,
                timeout=timeout_s or self._client.timeout,
            )
        except httpx.TransportError as error:
            raise _build_unreachable_error(url, error) from error
        return _decode_answer(answer.status_code, url, answer.content, reply)

    def close(self) -> None:
        self._client.close()


class AsyncWireClient:
    """Client like `WireClient` for an event loop, on one aiohttp session."""

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
        """POST `request` once, or GET without one, and decode the reply.

        `key` is sent in place of the client's own; `timeout_s` limits this call.
        """
        method, body = _encode_request(request)
        url = f"{self._base_url}{route}"
        headers = {"Content-Type": "application/json"} | build_key_header(key or self._key)
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
            raise _build_unreachable_error(url, error) from error
        return _decode_answer(status, url, content, reply)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _build_unreachable_error(url: str, error: Exception) -> ClusterError:
    return ClusterError(
        f"{url} is unreachable ({type(error).__name__}: {error})",
        hint="read that role's log in logs/latest",
    )


def _encode_request(request: msgspec.Struct | None) -> tuple[str, bytes | None]:
    return ("GET", None) if request is None else ("POST", msgspec.json.encode(request))


def _decode_answer(status_code: int, url: str, content: bytes, reply: type[ReplyT]) -> ReplyT:
    if status_code >= 400:
        raise HttpStatusError(status_code, url, content.decode(errors="replace"))
    try:
        return decode_json(content, reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClusterError(
            f"{url} answered what is no {reply.__name__} ({error}): {content[:200]!r}",
            hint="another program may have its port by now; read that role's log in logs/latest",
        ) from error
