"""Update session of the broadcast transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from areal_hpc.errors import WeightSyncError
from areal_hpc.faults import fault_point
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.buckets.bucket import OpenBucket
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.weights.transports.process_group import UpdateProcessGroup
from areal_hpc.weights.update_session import UpdateSession, _failed, log
from areal_hpc.wire.weight_version import WeightVersion


class BroadcastSession(UpdateSession):
    """The replicas of one update group, and the process group that reaches them.

    Lives over many updates while its replicas do.
    """

    def __init__(
        self, group: UpdateProcessGroup, members: Sequence[ReplicaClient], config: WeightsConfig
    ) -> None:
        super().__init__(members, config, group.name)
        self._group = group
        self._loading: list[Future[float]] = []
        """Of the bucket sent last: when each member had loaded it."""
        self._sent_at = 0.0

    def join(self) -> None:
        """Form the process group: this rank first, then the ranks of each replica in order."""
        self._all(lambda member: member.fence())
        group = self._group
        joining: list[Future[object]] = []
        offset = 1
        for member in self._members:
            joining.append(
                self._calls.submit(
                    member.join_group,
                    group.name,
                    group.host,
                    group.port,
                    offset,
                    group.world_size,
                    group.backend,
                )
            )
            offset += member.key.tp
        self._together(joining, group.join)
        for call in joining:
            call.result()

    def pause(self) -> None:
        """Stop generation and open the update session."""
        super().pause()
        self._loading = []
        self._all(lambda member: member.begin())

    def send(self, full: OpenBucket, version: WeightVersion | None) -> None:
        """Broadcast one bucket and wait until every member has loaded the one before it.

        A member alone is called to receive while it still loads, so that it begins at once. Of
        several, one may hear of a bucket before it hears of the one before, so they are not.

        Args:
            full: The bucket; it must not change before this returns.
            version: With the last bucket, the version that is now complete.
        """
        if len(self._members) > 1:
            self._await_loaded()
        before = self._loading
        receiving = [
            self._calls.submit(self._receive, member, full, version) for member in self._members
        ]
        self._together(
            receiving,
            lambda refused: self._group.broadcast(
                full.messages, lambda: refused() or _failed(before)
            ),
        )
        sent_at = time.monotonic()
        self._await_loaded()
        self._loading, self._sent_at = receiving, sent_at

    def _receive(
        self, member: ReplicaClient, full: OpenBucket, version: WeightVersion | None
    ) -> float:
        member.receive(full.bucket, self._group.name, version, packed=full.packed)
        return time.monotonic()

    def _await_loaded(self) -> None:
        """Wait until the bucket sent last is loaded."""
        loaded_at = [call.result() for call in self._loading]
        self.load_s += max(0.0, max(loaded_at, default=0.0) - self._sent_at)
        self._loading = []

    def end(self) -> None:
        """Close the update session: the server finishes what it loaded."""
        fault_point("weights.before_end")
        self._await_loaded()
        began = time.monotonic()
        self._all(lambda member: member.end())
        self.load_s += time.monotonic() - began

    def close(self) -> None:
        """Part in order: members forget the group, then this end leaves it."""

        def leave(member: ReplicaClient) -> bool:
            try:
                member.leave_group(self._group.name)
            except WeightSyncError as error:
                log.info("could not remove the replica from its process group: %s", error)
                return False
            return True

        have_left = [*self._calls.map(leave, self._members)]
        if all(have_left):
            self._group.close()
        else:
            self._group.abandon()  # to leave in order could mean to wait for the member
        self._release()

    def _part(self) -> None:
        self._group.abandon()

    def _together(
        self,
        calls: Sequence[Future[Any]],
        own_part: Callable[[Callable[[], bool]], None],
    ) -> None:
        """Take this rank's part in a collective while the members are called to take theirs."""
        try:
            own_part(lambda: _failed(calls))
        except WeightSyncError as error:
            for call in self._loading:
                if _failed([call]):
                    call.result()
            missing = "; ".join(self._missing(calls)) or "all members answered"
            raise WeightSyncError(
                f"{error.problems[0].message}: {missing}",
                hint="read the logs of those cells in logs/latest",
            ) from error

    def _missing(self, calls: Sequence[Future[Any]]) -> Iterator[str]:
        """The members that refused or have not answered, and their ranks in the group."""
        first_rank = 1
        for member, call in zip(self._members, calls, strict=True):
            tp = member.key.tp
            ranks = f"rank {first_rank}" if tp == 1 else f"ranks {first_rank}-{first_rank + tp - 1}"
            first_rank += tp
            if not call.done():
                yield f"{ranks}: {member.key} has not answered"
                continue
            try:
                call.result()
            except WeightSyncError as refusal:
                yield f"{ranks}: {refusal.problems[0].message}"
