"""Router: a verified replica for each session, sticky by session."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Container

from areal_hpc.errors import ClusterError, ProxyRequestError
from areal_hpc.proxy.engine.replicas import ReplicaSource
from areal_hpc.wire.replicas import ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

REPLICA_POLL_S = 1.0
NO_REPLICA_POLL_S = 0.2


def pack_weight_version(version: str) -> int:
    """What SGLang calls its weights as one integer; 0 for weights that nobody gave a version."""
    try:
        return WeightVersion.parse(version).packed
    except ValueError:
        return 0


class Router:
    """Follows the replicas and picks one for each session."""

    def __init__(self, source: ReplicaSource) -> None:
        self._source = source
        self._serving: dict[int, ReplicaView] = {}
        self._home: dict[str, int] = {}
        self._load: Counter[int] = Counter()
        self._refreshed = asyncio.Event()
        self._refresh_now = asyncio.Event()
        self.newest_version = 0
        """Packed version of the newest weights that any of them is known to have sampled from."""

    @property
    def serving_count(self) -> int:
        """Replicas that may answer now."""
        return len(self._serving)

    async def poll_replicas(self) -> None:
        """Look again and again until cancelled."""
        while True:
            self._refresh_now.clear()
            await self._refresh_replicas()
            self._refreshed.set()
            self._refreshed = asyncio.Event()
            pause_s = REPLICA_POLL_S if self._serving else NO_REPLICA_POLL_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._refresh_now.wait(), pause_s)

    async def _refresh_replicas(self) -> None:
        try:
            replicas = await self._source.fetch_replicas()
        except ClusterError as error:
            log.debug("the control proxy does not answer: %s", error)
            replicas = []  # its SGLang servers die with it
        except OSError as error:  # too many open files, or storage that stalls: that tells nothing
            log.warning("cannot look for replicas: %s", error)
            return
        serving = {one.index: one for one in replicas if one.state == "serving"}
        if serving.keys() != self._serving.keys():
            log.info("replicas serving: %s", sorted(serving) or "none")
        self._serving = serving
        for replica in serving.values():
            self.update_newest_version(pack_weight_version(replica.version))

    def update_newest_version(self, packed: int) -> None:
        """A replica serves these weights, or has sampled from them."""
        self.newest_version = max(self.newest_version, packed)

    async def pick_replica(
        self, session_id: str, give_up_at: float, avoid: Container[int] = ()
    ) -> ReplicaView:
        """The session's replica, another if that one no longer serves; waits while none does.

        Replicas to avoid, by index, have lost the call before: they are asked if no other serves.

        Raises:
            ProxyRequestError: 503, no replica served by `give_up_at` of the monotonic clock.
        """
        while not self._serving:
            remaining_s = give_up_at - time.monotonic()
            if remaining_s <= 0:
                raise ProxyRequestError(503, "no replica is available")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._refreshed.wait(), remaining_s)
        home = self._home.get(session_id)
        if home is None or home in avoid or home not in self._serving:
            others = [index for index in self._serving if index not in avoid]
            home = min(others or self._serving, key=lambda index: (self._load[index], index))
            self._home[session_id] = home
        return self._serving[home]

    def on_call_started(self, replica: ReplicaView) -> None:
        """Count a call in flight on the replica."""
        self._load[replica.index] += 1

    def on_call_finished(self, replica: ReplicaView) -> None:
        """The call is over, however it went."""
        self._load[replica.index] -= 1

    def on_replica_lost(self, replica: ReplicaView) -> None:
        """Route nothing to the replica until it is said again that it serves."""
        current = self._serving.get(replica.index)
        if current is not None and current.incarnation == replica.incarnation:
            del self._serving[replica.index]
        self._refresh_now.set()

    def forget_session(self, session_id: str) -> None:
        """The session makes no more calls."""
        self._home.pop(session_id, None)

    async def close(self) -> None:
        """Close pooled connections."""
        await self._source.close()
