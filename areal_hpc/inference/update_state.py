"""Weight-update state of one replica: fenced, changing, verified, overdue.

    fence -> pause_generation -> begin_weight_update -> ... -> continue_generation -> serve
    |--------- untouched -------|---------- changed ---------------------------------|

Until the change begins the server holds the weights that were verified last, whatever becomes of
the sender. From there on nobody can vouch for them but by verifying them anew.
"""

import math

WEIGHT_CHANGING_ROUTES = ("begin_weight_update", "update_weights_from_disk")
"""Control calls with which a change of the weights begins."""


class WeightUpdateState:
    """The update of one incarnation as its cell sees it. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._version = ""
        self._is_fenced = False
        self._fence_stays = False
        self._sender_until = math.inf
        self._calls_in_flight = 0
        self._busy_since = self._busy_s = 0.0
        self.last_busy_s = 0.0
        """Of the newest update: seconds in which control calls were under way."""
        self.is_closing = False
        """The cell is ending the update of a sender that vanished: a new one has to wait."""
        self.unanswered = ""
        """The control call that SGLang never answered: it is stuck."""
        self.is_paused = False
        """SGLang holds generation back."""
        self.is_changed = False
        """A change of the weights was begun and has not been verified."""

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
        """Take the replica out of service. A second fence does not put off the deadline."""
        if not self._is_fenced:
            self._busy_s = 0.0
        self._is_fenced = True
        self._fence_stays = stays_if_sender_lost
        self._start_sender_deadline(now + sender_timeout_s)

    def on_call_started(self, route: str, now: float, sender_timeout_s: float) -> None:
        """A control call is about to be forwarded to SGLang."""
        if not self._calls_in_flight:
            self._busy_since = now
        self._calls_in_flight += 1
        if route in WEIGHT_CHANGING_ROUTES:
            self._version, self.is_changed = "", True
            self._start_sender_deadline(now + sender_timeout_s)

    def on_call_finished(
        self, route: str, now: float, sender_timeout_s: float, *, accepted: bool
    ) -> None:
        """A forwarded call is over.

        Each one that SGLang accepted puts off the deadline, but for pauses: SGLang accepts
        those even when it is stuck.
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
        """The weights were verified."""
        self._version = version
        self.last_busy_s = self._busy_s
        self.is_changed = self._is_fenced = self._fence_stays = False
        self._sender_until = math.inf

    def drop_lost_sender(self) -> None:
        """The sender vanished before it changed anything: the old weights are as good as ever."""
        assert not self.is_changed
        self.is_paused = self.is_closing = False
        self._is_fenced = self._fence_stays
        self._sender_until = math.inf

    def _start_sender_deadline(self, deadline_at: float) -> None:
        if not self.has_sender:
            self._sender_until = deadline_at
