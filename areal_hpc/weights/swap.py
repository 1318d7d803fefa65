"""The update of one group of replicas, step by step.

    join -> pause -> (send each bucket) -> end -> verify -> flush -> resume     by broadcast
            pause -> load                      -> verify -> flush -> resume     from disk

Generations in flight stop at the pause and go on under the new weights.

A replica is fenced before anything else is asked of it, so whichever step raises, its group's
replicas are out of service. If no sender comes back in time, the cell restarts those whose
weights were begun to change and lets the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from areal_hpc.errors import WeightSyncError
from areal_hpc.faults import fault_point
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.bucket import OpenBucket
from areal_hpc.weights.checksum import Digests, compare
from areal_hpc.weights.control import ReplicaControl
from areal_hpc.weights.group import UpdateGroup
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)

Call = Callable[[ReplicaControl], object]


class Swap:
    """Some replicas that take the steps of an update together.

    Every method raises WeightSyncError when a member fails or a deadline passes; the object is
    then of no more use but to be given up.

    Args:
        members: The replicas.
        config: What becomes of the keys and values of generations in flight.
        name: For its threads.
    """

    def __init__(self, members: Sequence[ReplicaControl], config: WeightsConfig, name: str) -> None:
        self._members = members
        self._config = config
        self.load_s = 0.0
        """Seconds of this update in which the members loaded what they had received."""
        self._calls = ThreadPoolExecutor(2 * len(members), thread_name_prefix=f"swap-{name}")

    @property
    def keys(self) -> tuple[ReplicaKey, ...]:
        """Its replicas."""
        return tuple(member.key for member in self._members)

    def pause(self) -> None:
        """Stop generation."""
        self.load_s = 0.0
        self._all(lambda member: member.fence())
        self._all(lambda member: member.pause(self._config.pause_mode))

    def verify(
        self, version: WeightVersion, expected: Mapping[tuple[int, int], Digests] | None
    ) -> None:
        """Check that every member holds what was sent.

        Args:
            version: What the server must stamp on tokens.
            expected: Hashes by (tensor-parallel size, rank); None checks the version alone.
        """

        def check(member: ReplicaControl) -> None:
            found = member.weight_version()
            if found != str(version):
                raise WeightSyncError(f"{member.key}: expected version {version}, got {found!r}")
            if expected is not None:
                reported = dict(member.checksums())
                if len(reported) != member.key.tp:
                    raise WeightSyncError(
                        f"{member.key}: expected checksums of {member.key.tp} ranks, got those of "
                        f"{sorted(reported)}"
                    )
                for rank, checksums in reported.items():
                    who = f"{member.key}, rank {rank}"
                    compare(expected[member.key.tp, rank], checksums, who)

        self._all(check)

    def flush(self) -> None:
        """Drop what the old weights computed; in place, the old cache stays in use on purpose."""
        if self._config.pause_mode != "in_place":
            self._all(lambda member: member.flush())

    def resume(self, version: WeightVersion) -> None:
        """Let generation go on under the new weights and open the replicas to agents."""

        def release(member: ReplicaControl) -> None:
            member.resume()
            member.serve(version)

        self._all(release)

    def close(self) -> None:
        """Part in order."""
        self._release()

    def abandon(self) -> None:
        """Part at once; members that wait for bytes get an error instead."""
        self._part()
        self._release()

    def give_up(self) -> None:
        """Leave at once, and keep the members out of service until another update."""

        def tell(member: ReplicaControl) -> None:
            try:
                member.give_up()
            except WeightSyncError as error:
                log.info("not told that it was given up: %s", error)

        self._part()
        with ThreadPoolExecutor(len(self._members)) as calls:  # those of `_calls` may be stuck
            calls.map(tell, self._members)
        self._release()

    def _part(self) -> None:
        """Nothing but calls ties these members."""

    def _release(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        for member in self._members:
            member.close()

    def _all(self, call: Call) -> None:
        """Make one call to every member at once."""
        for future in [self._calls.submit(call, member) for member in self._members]:
            future.result()


class GroupSwap(Swap):
    """The replicas of one update group, and the process group that reaches them.

    Lives over many updates while its replicas do.
    """

    def __init__(
        self, group: UpdateGroup, members: Sequence[ReplicaControl], config: WeightsConfig
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
        self, member: ReplicaControl, full: OpenBucket, version: WeightVersion | None
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

        def leave(member: ReplicaControl) -> bool:
            try:
                member.leave_group(self._group.name)
            except WeightSyncError as error:
                log.info("not told to leave its update group: %s", error)
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


def _failed(calls: Sequence[Future[Any]]) -> bool:
    return any(call.done() and call.exception() is not None for call in calls)
