"""Comparison of this node's clock with that of the ledger's node, by heartbeats."""

import math

from areal_hpc.rundir.telemetry.spans import record_clock_sample

CLOCK_OFFSET_RECORD_INTERVAL_S = 15.0
"""The best comparison of so long is recorded, and the very first one."""


class LedgerClockOffsetRecorder:
    """What heartbeats tell of two clocks, recorded with the spans of this process."""

    def __init__(self) -> None:
        self._best = (0.0, math.inf)
        self._record_at = -math.inf

    def record_heartbeat_times(
        self, sent_at: float, received_at: float, answered_at: float, got_at: float
    ) -> None:
        """Take the four times of one heartbeat: those in the middle are the ledger's clock.

        The way there and the way back are taken to be equally long, as NTP does (RFC 5905, 8): the
        offset is wrong by half the time of both at most.
        """
        if not received_at or got_at < sent_at:  # the clock was set meanwhile
            return
        offset_s = ((received_at - sent_at) + (answered_at - got_at)) / 2
        error_s = max(0.0, (got_at - sent_at) - (answered_at - received_at)) / 2
        if error_s < self._best[1]:
            self._best = offset_s, error_s
        if got_at >= self._record_at:
            record_clock_sample(*self._best)
            self._best, self._record_at = (0.0, math.inf), got_at + CLOCK_OFFSET_RECORD_INTERVAL_S
