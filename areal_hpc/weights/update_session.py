"""Update session: the update of one replica group, step by step.

    join -> pause -> (send each bucket) -> end -> verify -> flush -> resume     by broadcast
            pause -> load                      -> verify -> flush -> resume     from disk

Generations in flight stop at the pause and go on under the new weights.

A replica is fenced before anything else is asked of it, so whichever step raises, its group's
replicas are out of service. If no sender comes back in time, the cell restarts those whose
weights were begun to change and lets the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.checksum import Digests, compare_checksums
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)
ReplicaCall = Callable[[ReplicaClient], object]


class UpdateSession:
    """Some replicas that take the steps of an update together.

    Every method raises WeightSyncError when a member fails or a deadline passes; the object is
    then of no more use but to be given up.

    Args:
        members: The replicas.
        config: What becomes of the keys and values of generations in flight.
        name: For its threads.
    """

    def __init__(self, members: Sequence[ReplicaClient], config: WeightsConfig, name: str) -> None:
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

        def check(member: ReplicaClient) -> None:
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
                    compare_checksums(expected[member.key.tp, rank], checksums, who)

        self._all(check)

    def flush(self) -> None:
        """Drop what the old weights computed; in place, the old cache stays in use on purpose."""
        if self._config.pause_mode != "in_place":
            self._all(lambda member: member.flush())

    def resume(self, version: WeightVersion) -> None:
        """Let generation go on under the new weights and open the replicas to agents."""

        def release(member: ReplicaClient) -> None:
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

        def tell(member: ReplicaClient) -> None:
            try:
                member.give_up()
            except WeightSyncError as error:
                log.info("could not tell the replica that the update was abandoned: %s", error)

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

    def _all(self, call: ReplicaCall) -> None:
        """Make one call to every member at once."""
        for future in [self._calls.submit(call, member) for member in self._members]:
            future.result()


def _failed(calls: Sequence[Future[Any]]) -> bool:
    return any(call.done() and call.exception() is not None for call in calls)
