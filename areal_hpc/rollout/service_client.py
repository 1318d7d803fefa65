"""Client of one service of the run, followed across restarts."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from areal_hpc.errors import ClusterError, HttpStatusError
from areal_hpc.rundir import rendezvous
from areal_hpc.wire.http import BACKOFF, RETRYABLE_STATUSES, AsyncWireClient
from areal_hpc.wire.service_key import derive_bearer_key, make_client_tls

log = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")


class ServiceClient:
    """Calls that outlast a restart of the peer, which comes back at another address."""

    def __init__(self, directory: Path, service_name: str, service_key: str) -> None:
        self._directory = directory
        self._name = service_name
        key = derive_bearer_key(service_key, service_name)
        self._client = AsyncWireClient("", key, tls=make_client_tls(service_key))
        self._endpoint: rendezvous.ServiceEndpoint | None = None
        self._answered_at = time.monotonic()

    @property
    def url(self) -> str:
        return self._endpoint.url if self._endpoint else ""

    @property
    def peer_started_at(self) -> float:
        return self._endpoint.started_at if self._endpoint else 0.0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered_at

    async def call_until_answered(
        self,
        route: str,
        request: msgspec.Struct | None,
        reply: type[ReplyT],
        *,
        key: str = "",
        timeout_s: float | None = None,
    ) -> ReplyT:
        """POST `request`, or GET where there is none, until the peer answers.

        A session's `key` goes in place of the driver's; `timeout_s` limits one try.

        Raises:
            HttpStatusError: The peer answered with an error that repeating will not fix.
        """
        pauses = iter(BACKOFF)
        while True:
            pause_s = next(pauses)
            if self._endpoint is None:
                self._update_endpoint()
            if self._endpoint is not None:
                try:
                    answer = await self._client.call(
                        f"{self.url}{route}", request, reply, key=key, timeout_s=timeout_s
                    )
                    self._answered_at = time.monotonic()
                    return answer
                except HttpStatusError as refusal:
                    if refusal.status not in RETRYABLE_STATUSES:
                        # It may be a successor at the same address, which knows less.
                        self._update_endpoint()
                        raise
                    trouble: ClusterError = refusal
                except ClusterError as error:
                    trouble = error
                if pause_s == BACKOFF.max_s:
                    log.warning("cannot reach %s yet: %s", self._name, trouble)
            await asyncio.sleep(pause_s)
            self._update_endpoint()

    def _update_endpoint(self) -> None:
        found = rendezvous.find_endpoint(self._directory, self._name)
        if found is not None and found != self._endpoint:
            self._endpoint = found
            log.info("%s is at %s", self._name, found.url)

    async def close(self) -> None:
        await self._client.close()


@dataclass(frozen=True, slots=True)
class ServiceClients:
    """The services that a driver calls."""

    ledger: ServiceClient
    proxy: ServiceClient

    async def close(self) -> None:
        await self.ledger.close()
        await self.proxy.close()
