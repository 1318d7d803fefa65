"""Tries of one call on the replicas, and when they end: a bad call is its own fault.

A call that is repeated for as long as its time lasts asks an engine that cannot answer it hundreds
of times, and carries what engines die of to every replica of the cell.
"""

from areal_hpc.errors import RepeatedlyFailedCallError
from areal_hpc.proxy.engine.generation import (
    EngineHungUpError,
    EngineResponseError,
    UnfinishedEngineCallError,
)
from areal_hpc.wire.replicas import ReplicaView

MAX_ENGINE_FAILURES_PER_CALL = 3
"""Tries that an engine has received and answered with an error, or hung up on."""
MAX_REPLICA_HANGUPS_PER_CALL = 2
"""Replicas that may hang up on a call. Dying under two in turn is hardly a coincidence."""
RETRY_PAUSE_S = 0.2
RETRY_PAUSE_AFTER_ENGINE_ERROR_S = 1.0
"""After an engine's error: time to learn whether it still serves."""


class CallTries:
    """What one call has met so far.

    A replica that could not be reached, or that broke a call off as its owner told it to, says
    nothing of the call: that is not counted.
    """

    def __init__(self) -> None:
        self.lost: set[int] = set()
        """Replicas that did not finish the call, by index."""
        self._failed = 0
        self._hung_up: set[tuple[int, int]] = set()

    def count_lost_try_or_raise(
        self, replica: ReplicaView, error: UnfinishedEngineCallError
    ) -> None:
        """The replica did not finish the call."""
        self.lost.add(replica.index)
        if isinstance(error, EngineHungUpError):
            self._hung_up.add((replica.index, replica.incarnation))
        if isinstance(error, EngineHungUpError | EngineResponseError):
            self._failed += 1
        if len(self._hung_up) >= MAX_REPLICA_HANGUPS_PER_CALL:
            raise RepeatedlyFailedCallError(
                f"{len(self._hung_up)} replicas hung up on this call, so no other is asked: {error}"
            ) from error
        if self._failed >= MAX_ENGINE_FAILURES_PER_CALL:
            raise RepeatedlyFailedCallError(
                f"{self._failed} tries of this call failed: {error}"
            ) from error

    def get_pause_s(self, error: UnfinishedEngineCallError) -> float:
        """How long to wait before the next try."""
        return (
            RETRY_PAUSE_AFTER_ENGINE_ERROR_S
            if isinstance(error, EngineResponseError)
            else RETRY_PAUSE_S
        )
