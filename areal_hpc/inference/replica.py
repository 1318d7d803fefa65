"""Replica of a cell: an SGLang server that is replaced when it dies, and its reported state.

starting -> ready -> serving
   ^          |         |        fence: serving -> ready
   +----------+---------+        death, silence, or an unfinished change of weights
"""

import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError, ControlCallRefusedError, RecipeError
from areal_hpc.inference.multi_node import NodePartTracker
from areal_hpc.inference.server.command import ServerCommand, ServerPorts
from areal_hpc.inference.server.sglang_main import SCORING_ID_PREFIX
from areal_hpc.inference.server.sglang_server import (
    HealthProbe,
    SGLangServer,
    choose_server_ports,
    find_error_line,
)
from areal_hpc.inference.update_state import WeightUpdateState
from areal_hpc.jobs.restarts import RestartPolicy
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir.paths import list_restart_dirs
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.rundir.telemetry.spans import record_span
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.replicas import (
    NO_KEYS,
    FenceReplicaRequest,
    ReopenReplicaRequest,
    ReplicaState,
    ReplicaView,
    UpdatePauseStats,
)
from areal_hpc.wire.retry import Backoff

log = logging.getLogger(__name__)
_SERVER_RESTART_BACKOFF = Backoff(0.5, 30.0)
_REFUSALS = (
    *("ValueError", "TypeError", "KeyError", "AttributeError", "NotImplementedError"),
    *("ImportError", "OSError: Can't load"),  # the latter by transformers, for a missing file
)
"""Errors that would end another start, too: memory and ports do not cause them."""
_MAX_PORT_RACES = 5
_CONTEXT_RESERVE_TOKENS = 8
"""Maximum part of a replica's context that SGLang does not give to a prompt."""
BuildCommand = Callable[[int, ServerPorts], ServerCommand]
"""Builder of a start's command from (incarnation, ports)."""


@dataclass(frozen=True, slots=True)
class ControlCallerIdentity:
    server_incarnation: int
    trainer_generation: int
    sender_timeout_s: float
    """Time without a call after which the caller is lost."""


class Replica:
    """Replica: a server and its successors.

    `maintain_server_once` runs in the job's main thread; the control proxy's thread calls
    `build_view` and reports its calls. A lock makes each change atomic for the other thread.
    """

    def __init__(
        self,
        index: int,
        config: InferenceConfig,
        *,
        launch: BuildCommand,
        log_dir: Path,
        events: EventLog,
        policy: RestartPolicy,
        clock: AwakeClock,
        loaded_version: str = "",
    ) -> None:
        """Create a replica; with a `loaded_version` it serves the loaded weights at once."""
        self.index = index
        self._config = config
        self.nodes = NodePartTracker(config.nodes_per_replica)
        self._launch = launch
        self._log_dir = log_dir
        self._events = events
        self.clock = clock
        """Clock of all times here; it stops while this process is paused."""
        self.is_traced = False
        """Whether SGLang's profiler runs: its server answers nothing while it writes a trace."""
        self._policy = policy
        self._loaded_version = loaded_version
        self._lock = threading.RLock()
        self._server: SGLangServer | None = None
        self._state: ReplicaState = "starting"
        self._update_state = WeightUpdateState()
        self._incarnation = self._read_last_incarnation()
        self._update_pause: UpdatePauseStats | None = None
        self._generation = 0
        self._probe: HealthProbe | None = None
        self._ready_at = 0.0
        self._fenced_at = 0.0
        """Start of the current update; 0 without one."""
        self._paused_at = 0.0
        """Time of the last request to pause generation."""
        self._crashes = 0
        self._refusal = ""
        """Error of the previous start, if a Python exception ended it."""
        self._port_races = 0
        self._failures_in_a_row = 0
        self._not_before = 0.0

    def build_view(self) -> ReplicaView:
        """Build the state that the cell reports."""
        with self._lock:
            version = self._update_state.served_version
            return ReplicaView(
                self.index,
                self._incarnation,
                "serving" if version else self._state,
                self._server.url if self._server else "",
                version,
                self._config.tp,
                self._update_pause,
                self._server.keys if self._server else NO_KEYS,
            )

    def _read_last_incarnation(self) -> int:
        """Read the number from the names of log files, so that a restarted job continues counting.

        Under Slurm each restart of a job has a log folder of its own, beside the others.
        """
        folders = [self._log_dir, *(path for _, path in list_restart_dirs(self._log_dir.parent))]
        logs = (path for folder in folders for path in folder.glob("*.log"))
        matches = (re.fullmatch(rf"replica-{self.index}\.(\d+)\.log", path.name) for path in logs)
        return max((int(match[1]) for match in matches if match), default=0)

    # -- the job's main thread ---------------------------------------------------------------

    def maintain_server_once(self) -> None:
        """Check the server once, and start, promote or replace it."""
        now = self.clock.now()
        if self._server is None:
            if now >= self._not_before:
                self._start_server()
        elif death := self._server.find_death_reason() or self.nodes.find_loss_reason(now):
            self._replace_server(self._server, death)
        elif self._state == "starting":
            self._poll_starting_server(self._server, now)
        elif route := self._update_state.unanswered:
            self._replace_server(self._server, f"did not respond to {route}", is_crash=False)
        elif self._close_overdue_update(now):
            self._recover_from_lost_sender(self._server)
        elif self._probe is not None and self._probe.check_silence(
            may_ask=not (self._update_state.has_sender or self.is_traced)
        ):
            timeout_s = self._config.health_timeout_s
            self._replace_server(self._server, f"was unresponsive for {timeout_s:.0f} s")

    def _start_server(self) -> None:
        incarnation, ports = self._incarnation + 1, choose_server_ports()
        log_path = self._log_dir / f"replica-{self.index}.{incarnation}.log"
        server = SGLangServer(
            self._launch(incarnation, ports), ports, log_path, started_at=self.clock.now()
        )
        with self._lock:
            self._server, self._incarnation = server, incarnation
            self._state, self._update_state = "starting", WeightUpdateState()
            self._update_pause = None
        self.nodes.request_node_parts(incarnation, ports.meeting_point)
        self._record_event("replica_started", log=str(log_path))
        log.info("replica %d: incarnation %d starts (%s)", self.index, incarnation, server.url)

    def _poll_starting_server(self, server: SGLangServer, now: float) -> None:
        waited_s, timeout_s = now - server.started_at, self._config.startup_timeout_s
        if server.is_ready():
            with self._lock:
                self._state = "ready"
                if self._loaded_version:
                    self._update_state.mark_serving(self._loaded_version)
            self._probe = HealthProbe(server.url, self._config.health_timeout_s, self.clock)
            self._ready_at = now
            self._failures_in_a_row = 0
            self._record_event("replica_ready", seconds=round(waited_s, 2))
            self._record_span("server start", waited_s)
        elif waited_s > timeout_s:
            self._replace_server(server, f"was not ready within {timeout_s:.0f} s")
        elif server.check_binding_failed(now):
            self._replace_server(server, "could not bind its port")

    def _close_overdue_update(self, now: float) -> bool:
        with self._lock:
            self._update_state.is_closing = self._update_state.is_sender_overdue(now)
            return self._update_state.is_closing

    def _recover_from_lost_sender(self, server: SGLangServer) -> None:
        if self._update_state.is_changed:
            self._replace_server(
                server, "has weights of an update that no sender completed", is_crash=False
            )
        elif self._update_state.is_paused and not server.continue_generation():
            self._replace_server(
                server,
                "did not resume after an update that no sender completed",
                is_crash=False,
            )
        else:
            with self._lock:
                self._update_state.drop_lost_sender()
                self._fenced_at = 0.0
            self._record_event("weight_sender_lost", version=self._update_state.served_version)

    def _replace_server(self, server: SGLangServer, reason: str, *, is_crash: bool = True) -> None:
        """Kill a server, and decide when, or whether, the next one starts.

        Only a crash of the server counts against `max_restarts`.
        """
        has_usage_error, is_starting = server.has_usage_error, self._state == "starting"
        self.nodes.withdraw_node_parts()
        server.kill()
        log.error("replica %d %s; end of its log:\n%s", self.index, reason, server.read_log_tail())
        last_line = find_error_line(server.read_log_tail())
        self._record_event(
            "replica_died", reason=reason, last_line=last_line, log=str(server.log_path)
        )
        with self._lock:
            self._server, self._state, self._update_state = None, "starting", WeightUpdateState()
            self._fenced_at = 0.0
        if is_starting and has_usage_error:
            raise RecipeError(
                f"SGLang rejected its command line:\n{server.read_log_tail(3)}",
                key="inference.extra_args",
                hint=f"read {server.log_path}",
            )
        refusal = last_line if is_starting and last_line.startswith(_REFUSALS) else ""
        if refusal and refusal == self._refusal:
            raise RecipeError(
                f"SGLang ended twice as it started: {refusal}",
                key="inference",
                hint=f"choose another model or other options; read {server.log_path}",
            )
        self._refusal = refusal
        if is_starting and server.lost_port_race() and self._port_races < _MAX_PORT_RACES:
            self._port_races += 1  # retry at once with other ports; it is no crash
            return
        is_healthy = not is_starting and self.clock.now() - self._ready_at >= self._policy.healthy_s
        self._port_races = 0 if is_healthy else self._port_races
        self._crashes = self._policy.count_failures(
            self._crashes, made_progress=is_healthy, has_failed=is_crash
        )
        self._failures_in_a_row += 1
        if self._policy.decide([ClusterError.exit_code], self._crashes) == "fail":
            with self._lock:
                self._state = "failed"
            raise ClusterError(
                f"replica {self.index} {reason}, after {self._policy.max_failures} restarts; "
                f"end of its log:\n{server.read_log_tail()}",
                key="inference.max_restarts",
                hint=f"read {server.log_path}",
            )
        self._not_before = self.clock.now() + _SERVER_RESTART_BACKOFF.get_pause_s(
            self._failures_in_a_row - 1
        )

    def request_stop(self) -> None:
        if self._server is not None:
            self._server.request_stop()

    def kill(self, grace_s: float = 0.0) -> None:
        self.nodes.withdraw_node_parts()
        if self._server is not None:
            self._server.kill(grace_s)

    def _record_event(self, event: str, **fields: object) -> None:
        self._events.record(event, replica=self.index, incarnation=self._incarnation, **fields)

    def _record_span(self, span_name: str, seconds: float, **fields: object) -> None:
        now = time.time()
        record_span(span_name, now - seconds, now, f"replica {self.index}", **fields)

    # -- the control proxy's thread ------------------------------------
    # Each method raises ControlCallRefusedError if the call is for another incarnation, if the
    # replica is not ready, or if a newer generation of the trainer has called before.

    def stop_serving(
        self, caller: ControlCallerIdentity, request: FenceReplicaRequest
    ) -> ReplicaView:
        """Take the replica out of service before an update."""
        with self._lock:
            self._admit_caller(caller)
            self._update_state.mark_fenced(
                self.clock.now(), caller.sender_timeout_s, stays_if_sender_lost=request.stays
            )
            self._fenced_at = self._fenced_at or self.clock.now()
            return self.build_view()

    def start_serving(
        self, caller: ControlCallerIdentity, request: ReopenReplicaRequest
    ) -> ReplicaView:
        """Open the replica to agents."""
        with self._lock:
            self._admit_caller(caller)
            self._update_state.mark_serving(request.version)
            if self._fenced_at:
                duration_s = self.clock.now() - self._fenced_at
                self._record_span("weight update", duration_s, version=request.version)
                self._record_pause(request.version)
            self._fenced_at = 0.0
            return self.build_view()

    def _record_pause(self, version: str) -> None:
        pause_s = self.clock.now() - max(self._paused_at, self._fenced_at)
        busy_s = self._update_state.last_busy_s
        self._update_pause = UpdatePauseStats(version, round(pause_s, 4), round(busy_s, 4))
        self._record_event("replica_resumed", **msgspec.structs.asdict(self._update_pause))

    def begin_control_call(self, caller: ControlCallerIdentity, route: str) -> SGLangServer:
        """Register a control call; return the server to which it may be forwarded."""
        with self._lock:
            self._admit_caller(caller)
            now = self.clock.now()
            self._update_state.on_call_started(route, now, caller.sender_timeout_s)
            if route == "pause_generation":
                self._paused_at = now
            assert self._server is not None
            return self._server

    def build_scoring_body(self, input_ids: list[int]) -> bytes:
        """Build the request that scores a prompt without the cache, even while SGLang is paused."""
        max_tokens = (self._config.context_length or math.inf) - _CONTEXT_RESERVE_TOKENS
        return msgspec.json.encode(
            {
                "rid": f"{SCORING_ID_PREFIX}{uuid.uuid4().hex}",
                "input_ids": input_ids[: int(min(len(input_ids), max_tokens))],
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,  # behind this index SGLang does not use the cache
            }
        )

    def finish_control_call(
        self, caller: ControlCallerIdentity, route: str, accepted: bool | None
    ) -> None:
        """Register the end of a forwarded call; `accepted` is None if SGLang never answered."""
        with self._lock:
            if caller.server_incarnation != self._incarnation:
                return
            if accepted is None:
                self._update_state.unanswered = route
            now = self.clock.now()
            self._update_state.on_call_finished(
                route, now, caller.sender_timeout_s, accepted=bool(accepted)
            )

    def _admit_caller(self, caller: ControlCallerIdentity) -> None:
        name = f"replica {self.index}"
        if caller.server_incarnation != self._incarnation:
            raise ControlCallRefusedError(
                f"{name}: the call is for restart {caller.server_incarnation}, "
                f"the current restart is {self._incarnation}"
            )
        if self._state != "ready":
            raise ControlCallRefusedError(f"{name} is {self._state}")
        if self._update_state.is_closing:
            raise ControlCallRefusedError(f"{name} is ending the update of a sender that vanished")
        if caller.trainer_generation < self._generation:
            raise ControlCallRefusedError(
                f"{name}: generation {self._generation} of the trainer "
                f"has taken over from {caller.trainer_generation}"
            )
        self._generation = caller.trainer_generation
