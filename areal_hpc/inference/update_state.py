"""State of a replica's weight update: fenced, changing, verified, overdue.

    fence -> pause_generation -> begin_weight_update -> ... -> continue_generation -> serve
    |--------- untouched -------|---------- changed ---------------------------------|

Until the change begins, the server has the weights that were verified last, even if the sender is
lost. From then on the weights are unknown until they are verified again.
"""

import math

WEIGHT_CHANGING_ROUTES = ("begin_weight_update", "update_weights_from_disk")
"""Control calls that begin a change of the weights."""


class WeightUpdateState:
    """Update of one incarnation, as its cell sees it. Times are those of an `AwakeClock`."""

    def __init__(self) -> None:
        self._version = ""
        self._is_fenced = False
        self._fence_stays = False
        self._sender_until = math.inf
        self._calls_in_flight = 0
        self._busy_since = self._busy_s = 0.0
        self.last_busy_s = 0.0
        """Seconds of the newest update during which control calls were running."""
        self.is_closing = False
        """Whether the cell is ending the update of a lost sender: a new sender must wait."""
        self.unanswered = ""
        """Control call that SGLang never answered, since it hangs; empty if there is none."""
        self.is_paused = False
        """Whether SGLang has paused generation."""
        self.is_changed = False
        """Whether a change of the weights began and is not verified yet."""

    @property
    def served_version(self) -> str:
        return "" if self._is_fenced else self._version

    @property
    def has_sender(self) -> bool:
        return self._sender_until < math.inf

    def is_sender_overdue(self, now: float) -> bool:
        return now >= self._sender_until and not self._calls_in_flight

    def mark_fenced(
        self, now: float, sender_timeout_s: float, *, stays_if_sender_lost: bool
    ) -> None:
        """Take the replica out of service. A second fence does not extend the deadline."""
        if not self._is_fenced:
            self._busy_s = 0.0
        self._is_fenced = True
        self._fence_stays = stays_if_sender_lost
        self._start_sender_deadline(now + sender_timeout_s)

    def on_call_started(self, route: str, now: float, sender_timeout_s: float) -> None:
        """Record a control call that will be forwarded to SGLang."""
        if not self._calls_in_flight:
            self._busy_since = now
        self._calls_in_flight += 1
        if route in WEIGHT_CHANGING_ROUTES:
            self._version, self.is_changed = "", True
            self._start_sender_deadline(now + sender_timeout_s)

    def on_call_finished(
        self, route: str, now: float, sender_timeout_s: float, *, accepted: bool
    ) -> None:
        """Record the end of a forwarded call.

        Each accepted call extends the deadline, except for a pause, which SGLang accepts even when
        it hangs.
        """
        self._calls_in_flight -= 1
        if not self._calls_in_flight:
            self._busy_s += now - self._busy_since
        if not accepted:
            return
        if route == "continue_generation":
            self.is_paused = False
        elif route == "pause_generation":
            self.is_paused = True
            self._start_sender_deadline(now + sender_timeout_s)
        elif self.has_sender:
            self._sender_until = now + sender_timeout_s

    def mark_serving(self, version: str) -> None:
        """Put the replica into service with verified weights."""
        self._version = version
        self.last_busy_s = self._busy_s
        self.is_changed = self._is_fenced = self._fence_stays = False
        self._sender_until = math.inf

    def drop_lost_sender(self) -> None:
        """Drop a sender that was lost before it changed anything: the old weights stay valid."""
        assert not self.is_changed
        self.is_paused = self.is_closing = False
        self._is_fenced = self._fence_stays
        self._sender_until = math.inf

    def _start_sender_deadline(self, deadline_at: float) -> None:
        if not self.has_sender:
            self._sender_until = deadline_at
