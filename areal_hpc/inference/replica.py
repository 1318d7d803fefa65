"""One replica of a cell: a server that is replaced when it dies, and what the cell says of it.

starting -> ready -> serving
   ^          |         |        begin_weight_update: serving -> ready
   +----------+---------+        death, or a pause that nobody ends
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.inference.command import Command, Ports
from areal_hpc.inference.server import ServerProcess, free_ports
from areal_hpc.telemetry import EventLog
from areal_hpc.wire.replicas import ReplicaState, ReplicaView, ServeRequest

log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 30.0
_STOP_GRACE_S = 1.0
_PORT_RACES_FORGIVEN = 5

Launch = Callable[[int, Ports], Command]
"""(incarnation, ports) to the command of that start."""


class Replica:
    """A server and its successors.

    `tick` runs in the job's main thread; the relay's thread reads `view` and reports what
    passed through it. A lock keeps the two from seeing half a change.
    """

    def __init__(
        self,
        index: int,
        *,
        tp: int,
        launch: Launch,
        log_dir: Path,
        events: EventLog,
        startup_timeout_s: float,
        max_restarts: int,
    ) -> None:
        self.index = index
        self._tp = tp
        self._launch = launch
        self._log_dir = log_dir
        self._events = events
        self._startup_timeout_s = startup_timeout_s
        self._max_restarts = max_restarts
        self._lock = threading.Lock()
        self._server: ServerProcess | None = None
        self._state: ReplicaState = "starting"
        self._version = ""
        self._incarnation = self._last_incarnation()
        self._epoch = 0
        self._paused_until: float | None = None
        self._crashes = 0
        self._port_races = 0
        self._failures_in_a_row = 0
        self._not_before = 0.0

    def view(self) -> ReplicaView:
        """What the cell says of this replica."""
        with self._lock:
            url = self._server.url if self._server else ""
            return ReplicaView(
                self.index, self._incarnation, self._state, url, self._version, self._tp
            )

    def _last_incarnation(self) -> int:
        """Counted in log files, so that a restarted job goes on where its predecessor stopped."""
        found = (
            re.fullmatch(rf"replica-{self.index}\.(\d+)\.log", path.name)
            for path in self._log_dir.glob("*.log")
        )
        return max((int(match[1]) for match in found if match), default=0)

    # -- the job's main thread ---------------------------------------------------------------

    def tick(self) -> None:
        """Look after the server once: start, promote or replace it.

        Raises:
            RecipeError: SGLang does not understand its arguments.
            ClusterError: It died more often than `max_restarts`.
        """
        now = time.monotonic()
        if self._server is None:
            if now >= self._not_before:
                self._start()
        elif death := self._server.death():
            self._bury(self._server, death)
        elif self._state == "starting":
            self._await_ready(self._server, now)
        elif self._paused_until is not None and now >= self._paused_until:
            self._bury(self._server, "was paused, and its sender vanished", is_crash=False)

    def _start(self) -> None:
        incarnation, ports = self._incarnation + 1, free_ports()
        server = ServerProcess(
            self._launch(incarnation, ports),
            ports,
            self._log_dir / f"replica-{self.index}.{incarnation}.log",
        )
        with self._lock:
            self._server, self._incarnation = server, incarnation
            self._state, self._version, self._paused_until = "starting", "", None
        log.info("replica %d: incarnation %d starts (%s)", self.index, incarnation, server.url)

    def _await_ready(self, server: ServerProcess, now: float) -> None:
        waited_s = now - server.started_at
        if server.is_ready():
            with self._lock:
                self._state = "ready"
            self._failures_in_a_row = 0
            self._note("replica_ready", seconds=round(waited_s, 2))
        elif waited_s > self._startup_timeout_s:
            self._bury(server, f"was not ready within {self._startup_timeout_s:.0f} s")

    def _bury(self, server: ServerProcess, reason: str, *, is_crash: bool = True) -> None:
        """End what is left of a server and decide when, or whether, the next one starts.

        An end that was not the server's own fault does not count towards `max_restarts`.
        """
        usage_error, starting = server.usage_error, self._state == "starting"
        server.kill()
        log.error("replica %d %s; its log ends:\n%s", self.index, reason, server.log_tail())
        self._note("replica_died", reason=reason)
        with self._lock:
            self._server, self._state, self._version = None, "starting", ""
            self._paused_until = None
        if starting and usage_error:
            raise RecipeError(
                f"SGLang refused its arguments:\n{server.log_tail(3)}",
                key="inference.extra_args",
                hint=f"read {server.log_path}",
            )
        if starting and server.lost_port_race() and self._port_races < _PORT_RACES_FORGIVEN:
            self._port_races += 1  # other ports, at once; nobody's fault
            return
        self._crashes += is_crash
        self._failures_in_a_row += 1
        if self._crashes > self._max_restarts:
            with self._lock:
                self._state = "failed"
            raise ClusterError(
                f"replica {self.index} {reason}, after {self._max_restarts} restarts; "
                f"its log ends:\n{server.log_tail()}",
                key="inference.max_restarts",
                hint=f"read {server.log_path}",
            )
        backoff_s = min(0.25 * 2**self._failures_in_a_row, _LONGEST_BACKOFF_S)
        self._not_before = time.monotonic() + backoff_s

    def request_stop(self) -> None:
        """Ask the server to end."""
        if self._server is not None:
            self._server.request_stop()

    def kill(self) -> None:
        """End the server, by force if it is still there after a moment."""
        if self._server is not None:
            self._server.kill(_STOP_GRACE_S)

    def _note(self, event: str, **facts: object) -> None:
        self._events.record(event, replica=self.index, incarnation=self._incarnation, **facts)

    # -- the relay's thread ------------------------------------------------------------------

    def refusal(self, incarnation: int, epoch: int) -> str:
        """Why a trainer may not control this replica now; empty if it may."""
        with self._lock:
            if incarnation != self._incarnation:
                return f"incarnation {incarnation} is gone, {self._incarnation} is here"
            if self._state not in ("ready", "serving"):
                return f"it is {self._state}"
            if epoch < self._epoch:
                return f"epoch {self._epoch} of the trainer has taken over from {epoch}"
            self._epoch = epoch
            return ""

    def note_relayed(self, route: str, incarnation: int, deadline_s: float) -> None:
        """SGLang accepted a control call: keep track of what that means.

        A replica stays paused no longer than `deadline_s` after the last call that SGLang
        accepted. Repeated pauses do not count: SGLang accepts those even when it is stuck.
        """
        until = time.monotonic() + deadline_s
        with self._lock:
            if incarnation != self._incarnation:
                return
            if route == "continue_generation":
                self._paused_until = None
            elif (route == "pause_generation") == (self._paused_until is None):
                self._paused_until = until

    def note_weights_change(self) -> None:
        """An update is about to begin: nobody vouches for the weights any more."""
        with self._lock:
            if self._state == "serving":
                self._state, self._version = "ready", ""

    def serve(self, request: ServeRequest) -> ReplicaView | None:
        """Open the replica to agents; None when the request means another incarnation."""
        with self._lock:
            if request.incarnation != self._incarnation or self._server is None:
                return None
            self._state, self._version = "serving", request.version
        return self.view()
