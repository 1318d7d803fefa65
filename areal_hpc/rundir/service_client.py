"""Clients of a service of a run. They find it again at its new address after a restart."""

import logging
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.rendezvous import (
    ServiceEndpoint,
    derive_bearer_key,
    find_endpoint,
    make_client_tls,
)
from areal_hpc.wire.http import AsyncWireClient, WireClient
from areal_hpc.wire.retry import SERVICE_BACKOFF, retry_without_limit

log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")


class _Address:
    """Address of a service, read from its endpoint file."""

    def __init__(self, directory: Path, service_name: str) -> None:
        self._directory = directory
        self._name = service_name
        self.endpoint: ServiceEndpoint | None = None

    def look_up(self) -> str:
        """Return the service's URL; the last known one while the storage does not respond."""
        try:
            endpoint = find_endpoint(self._directory, self._name)
        except OSError:
            if self.endpoint is None:
                raise
            return self.endpoint.url
        if endpoint is not None and endpoint != self.endpoint:
            self.endpoint = endpoint
            log.info("%s is at %s", self._name, endpoint.url)
        if self.endpoint is None:
            raise ClusterError(
                f"{self._name} has not started (no endpoint file in {self._directory})",
                hint=f"read the log of {self._name} in logs/latest",
            )
        return self.endpoint.url


class ServiceClient:
    """Blocking client. While the service is down a call raises what `wire.retry` retries."""

    def __init__(
        self, directory: Path, service_name: str, service_key: str, *, timeout_s: float = 30.0
    ) -> None:
        self._address = _Address(directory, service_name)
        self._client = WireClient(
            "",
            derive_bearer_key(service_key, service_name),
            tls=make_client_tls(service_key),
            timeout_s=timeout_s,
        )

    def call(
        self,
        route: str,
        request: msgspec.Struct | None,
        reply: type[ReplyT],
        *,
        key: str = "",
        timeout_s: float | None = None,
    ) -> ReplyT:
        """POST `request` once, or GET where there is none, and decode the reply.

        `key` replaces the client's own key, for a session.
        """
        url = f"{self._address.look_up()}{route}"
        return self._client.call(url, request, reply, key=key, timeout_s=timeout_s)

    @property
    def url(self) -> str:
        return self._address.look_up()

    def close(self) -> None:
        self._client.close()


class AsyncServiceClient:
    """Client for event loops."""

    def __init__(
        self, directory: Path, service_name: str, service_key: str, *, timeout_s: float = 30.0
    ) -> None:
        self._name = service_name
        self._address = _Address(directory, service_name)
        self._client = AsyncWireClient(
            "",
            derive_bearer_key(service_key, service_name),
            tls=make_client_tls(service_key),
            timeout_s=timeout_s,
        )
        self._is_reached = False
        """Whether the last call was answered."""
        self._answered_at = time.monotonic()

    def look_up(self) -> None:
        """Read the service's file: a superseded service may still answer for a moment."""
        self._address.look_up()

    @property
    def url(self) -> str:
        return self._address.endpoint.url if self._address.endpoint else ""

    @property
    def peer_started_at(self) -> float:
        return self._address.endpoint.started_at if self._address.endpoint else 0.0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered_at

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

        `key` replaces the client's own key, for a session; `timeout_s` limits the call. The
        service's file is read only after a failure.
        """
        url = f"{self.url if self._is_reached else self._address.look_up()}{route}"
        try:
            answer = await self._client.call(url, request, reply, key=key, timeout_s=timeout_s)
        except ClusterError:
            self._is_reached = False
            self._address.look_up()  # a predecessor may have refused what its successor accepts
            raise
        self._is_reached, self._answered_at = True, time.monotonic()
        return answer

    async def call_repeatedly(
        self,
        route: str,
        request: msgspec.Struct | None,
        reply: type[ReplyT],
        *,
        key: str = "",
        timeout_s: float | None = None,
    ) -> ReplyT:
        """Repeat `call` while the service is down.

        Raises:
            HttpStatusError: The service answered with an error that a retry does not fix.
        """
        return await retry_without_limit(
            lambda: self.call(route, request, reply, key=key, timeout_s=timeout_s),
            self._log_outage,
        )

    def _log_outage(self, error: ClusterError, pause_s: float) -> None:
        if pause_s == SERVICE_BACKOFF.max_s and self._address.endpoint is not None:
            log.warning("cannot reach %s yet: %s", self._name, error)

    async def close(self) -> None:
        await self._client.close()
