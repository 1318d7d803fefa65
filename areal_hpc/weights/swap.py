"""The update of one group of replicas, step by step.

    join -> pause -> (send each bucket) -> end -> verify -> resume

A replica is fenced before anything else is asked of it, so whichever step raises, its group's
replicas are out of service. If no sender comes back in time, the cell restarts those whose
weights were begun to change and lets the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.bucket import PackedBucket
from areal_hpc.weights.checksum import Digests, compare
from areal_hpc.weights.control import ReplicaControl
from areal_hpc.weights.group import UpdateGroup
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.weights.version import WeightVersion

log = logging.getLogger(__name__)

Call = Callable[[ReplicaControl], object]


class GroupSwap:
    """The replicas of one update group and the process group that reaches them.

    Lives over many updates while its replicas do. Every method raises WeightSyncError when a
    member fails or a deadline passes; the object is then of no more use but to be given up.
    """

    def __init__(self, group: UpdateGroup, members: Sequence[ReplicaControl], mode: str) -> None:
        self._group = group
        self._members = members
        self._mode = mode
        self._calls = ThreadPoolExecutor(len(members), thread_name_prefix=f"swap-{group.name}")

    @property
    def keys(self) -> tuple[ReplicaKey, ...]:
        """Its replicas."""
        return tuple(member.key for member in self._members)

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

    def pause(self) -> None:
        """Stop generation and open the update session."""
        self._all(lambda member: member.fence())
        self._all(lambda member: member.pause(self._mode))
        self._all(lambda member: member.begin())

    def send(self, packed: PackedBucket, version: WeightVersion | None) -> None:
        """Broadcast one bucket and wait until every member has loaded it.

        Args:
            packed: A full bucket; it must not change before this returns.
            version: With the last bucket, the version that is now complete.
        """
        name = self._group.name
        receiving: list[Future[object]] = [
            self._calls.submit(member.receive, packed.bucket, name, version)
            for member in self._members
        ]
        self._together(
            receiving, lambda refused: self._group.broadcast(packed.flat, refused=refused)
        )

    def end(self) -> None:
        """Close the update session: the server finishes what it loaded."""
        self._all(lambda member: member.end())

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
                for rank, checksums in member.checksums():
                    who = f"{member.key}, rank {rank}"
                    compare(expected[member.key.tp, rank], checksums, who)

        self._all(check)

    def resume(self, version: WeightVersion) -> None:
        """Let generation go on under the new weights and open the replicas to agents."""

        def release(member: ReplicaControl) -> None:
            if self._mode == "retract":  # in place, the old cache stays in use on purpose
                member.flush()
            member.resume()
            member.serve(version)

        self._all(release)

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

    def abandon(self) -> None:
        """Leave at once; members that wait for bytes get an error instead."""
        self._group.abandon()
        self._release()

    def give_up(self) -> None:
        """Leave at once, and keep the members out of service until another update."""

        def tell(member: ReplicaControl) -> None:
            try:
                member.give_up()
            except WeightSyncError as error:
                log.info("not told that it was given up: %s", error)

        self._group.abandon()
        with ThreadPoolExecutor(len(self._members)) as calls:  # those of `_calls` may be stuck
            calls.map(tell, self._members)
        self._release()

    def _release(self) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        for member in self._members:
            member.close()

    def _all(self, call: Call) -> None:
        """Make one call to every member at once."""
        for future in [self._calls.submit(call, member) for member in self._members]:
            future.result()

    def _together(
        self, calls: Sequence[Future[object]], own_part: Callable[[Callable[[], bool]], None]
    ) -> None:
        """Take this rank's part in a collective while the members are called to take theirs."""

        def refused() -> bool:
            return any(call.done() and call.exception() is not None for call in calls)

        try:
            own_part(refused)
        except WeightSyncError:
            for call in calls:
                if call.done():
                    call.result()  # a member's own words say more than ours
            raise
        for call in calls:
            call.result()
