"""One JSON call over HTTP: msgspec in, msgspec out, errors with a name."""

from __future__ import annotations

import time
from typing import TypeVar

import aiohttp
import httpx
import msgspec

from areal_hpc.errors import ClusterError

Reply = TypeVar("Reply")

KEEP_ALIVE_S = 75
"""For which servers keep an idle connection. Clients must give up theirs earlier (httpx after 5 s,
aiohttp after 15), or a request meets the closing of its connection."""
RETRIED_STATUSES = frozenset({408, 425, 429, 502, 503, 504})


class HttpRefused(ClusterError):
    """The peer answered, with a status that says no."""

    def __init__(self, status: int, url: str, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:500]}")
        self.status = status
        self.body = body

    def __reduce__(self) -> tuple[object, ...]:
        return (HttpRefused, (self.status, str(self), self.body))


class WireClient:
    """Blocking JSON calls to one peer, retried until a deadline while the peer is away."""

    def __init__(self, base_url: str, key: str, *, timeout_s: float = 30.0) -> None:
        self._client = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=timeout_s,
            trust_env=False,
        )

    def call(
        self,
        route: str,
        request: msgspec.Struct,
        reply: type[Reply],
        *,
        patience_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Reply:
        """POST `request` and decode the reply.

        The call is repeated for `patience_s` while the peer refuses connections or is busy;
        `timeout_s` limits one try (the client's own limit when None).

        Raises:
            HttpRefused: The peer answered with an error that repeating will not mend.
            ClusterError: The peer could not be reached in time.
        """
        body = msgspec.json.encode(request)
        give_up_at = time.monotonic() + patience_s
        pause_s = 0.05
        while True:
            try:
                answer = self._client.post(
                    route, content=body, timeout=timeout_s or self._client.timeout
                )
                if answer.status_code < 400:
                    return msgspec.json.decode(answer.content, type=reply)
                if answer.status_code not in RETRIED_STATUSES:
                    raise HttpRefused(answer.status_code, str(answer.url), answer.text)
                trouble = f"answered {answer.status_code}: {answer.text[:200]}"
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() >= give_up_at:
                raise ClusterError(
                    f"{self._client.base_url}{route} is silent for {patience_s:.0f} s ({trouble})",
                    hint="read that role's log in logs/latest",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 1.0)

    def get(self, route: str, reply: type[Reply]) -> Reply:
        """GET and decode.

        Raises:
            HttpRefused: The peer answered with an error.
            ClusterError: The peer could not be reached.
        """
        try:
            answer = self._client.get(route)
        except httpx.TransportError as error:
            raise ClusterError(
                f"{self._client.base_url}{route} is out of reach ({type(error).__name__}: {error})"
            ) from error
        if answer.status_code >= 400:
            raise HttpRefused(answer.status_code, str(answer.url), answer.text)
        return msgspec.json.decode(answer.content, type=reply)

    def close(self) -> None:
        """Close pooled connections."""
        self._client.close()


class AsyncWireClient:
    """The same calls for event loops, on one shared aiohttp session."""

    def __init__(self, base_url: str, key: str, *, timeout_s: float = 30.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._key = key
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))

    async def call(
        self,
        route: str,
        request: msgspec.Struct,
        reply: type[Reply],
        *,
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """POST `request` once and decode the reply.

        A `key` replaces the client's own (a session's); `timeout_s` limits this call.

        Raises:
            HttpRefused: The peer answered with an error.
            ClusterError: The peer could not be reached.
        """
        limit = aiohttp.ClientTimeout(total=timeout_s) if timeout_s else self._session.timeout
        body = msgspec.json.encode(request)
        return await self._exchange("POST", route, reply, key or self._key, limit, body)

    async def get(self, route: str, reply: type[Reply]) -> Reply:
        """GET and decode. Raises as `call` does."""
        return await self._exchange("GET", route, reply, self._key, self._session.timeout)

    async def _exchange(
        self,
        method: str,
        route: str,
        reply: type[Reply],
        key: str,
        limit: aiohttp.ClientTimeout,
        body: bytes | None = None,
    ) -> Reply:
        url = f"{self._base_url}{route}"
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=limit
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterError(
                f"{url} is out of reach ({type(error).__name__}: {error})"
            ) from error
        if answer.status >= 400:
            raise HttpRefused(answer.status, url, content.decode(errors="replace"))
        return msgspec.json.decode(content, type=reply)

    async def close(self) -> None:
        """Close pooled connections."""
        await self._session.close()
