"""What a run does at the moment, and what a person should hear of at once, told once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.jobs.restart_policy import PERMANENT_EXIT_CODES
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.rundir.telemetry import events as telemetry
from areal_hpc.view.events.failures import (
    AgentFailures,
    FailureCause,
    collect_failure_events,
)
from areal_hpc.view.tables import format_duration
from areal_hpc.wire.ledger import LedgerStatus

MAX_SHOWN_CAUSES = 5
_EVENTS_ANNOUNCED_ONCE_PER_PLACE = ("event_loop_blocked", "episode_slow", "weights_published")
_SUBJECT_BY_EVENT = {
    **dict.fromkeys(_EVENTS_ANNOUNCED_ONCE_PER_PLACE, "agent"),
    "replica_died": "server",
    "process_exited": "process",
    "weights_published": "weights",
}
"""Events that are told at once, in the words of `areal-hpc why`."""


@dataclass(slots=True)
class NewEventLineFormatter:
    failures: AgentFailures = field(default_factory=AgentFailures)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def describe_if_new(self, event: dict[str, Any]) -> list[str]:
        if (cause := self.failures.add_event(event)) is not None:
            return list(
                self._format_failure_lines(cause, str(event.get("then", "it is tried again")))
            )
        if event["event"] == "weights_published" and event.get("replicas"):
            return []
        if event["event"] in _EVENTS_ANNOUNCED_ONCE_PER_PLACE:
            key = (event["event"], str(event.get("at") or event["role"]))
            if key in self._told:
                return []
            self._told.add(key)
        return list(_format_event_lines(event))

    def _format_failure_lines(self, cause: FailureCause, consequence: str) -> Iterator[str]:
        number = len(self.failures.causes)
        if number > MAX_SHOWN_CAUSES:
            if number == MAX_SHOWN_CAUSES + 1:
                yield "agent    fails in further ways: areal-hpc why RUN lists them"
            return
        said, share = cause.message.removeprefix("the agent "), self.failures.share_text
        yield f"agent    {said}  ({share} so far; {consequence})"
        if cause.place:
            yield f"         at: {cause.place}"
        yield f"         try: {cause.suggested_fix}"


def _format_event_lines(event: dict[str, Any]) -> Iterator[str]:
    match event["event"]:
        case telemetry.RANKS_HANG_EVENT:
            yield f"trainer  stands still: {event.get('ranks', 'no rank is known to move')}"
            yield "         read the stacks at the end of those ranks' logs in logs/latest"
        case "state_loaded" if step := event.get("step"):
            yield f"resumed  from the checkpoint of step {step}"
        case "process_exited" if event.get("exit_code") in PERMANENT_EXIT_CODES:
            pass  # the command ends with that error, in better words
        case name if name in _SUBJECT_BY_EVENT:
            for found in collect_failure_events([event], None):
                again = "; it is started again" if name == "replica_died" else ""
                text = found.text.removeprefix("the agent ") + again
                yield f"{_SUBJECT_BY_EVENT[name]:<8} {text}"
                yield f"         try: {found.hint}"


SERVER_LOG_TAIL_BYTES = 16384
_SERVER_PHASES = (
    ("Load weight begin", "loads weights"),
    ("Load weight end", "allocates its cache"),
    ("Capture cuda graph begin", "captures CUDA graphs"),
    ("Engine startup timings", "warms up"),
)
"""Lines of SGLang's log (0.5.23), in their order, and what it does from then on."""


@dataclass(slots=True)
class _StartingServer:
    since: float
    log: str


@dataclass(slots=True)
class RunPhaseTracker:
    _starting: dict[tuple[str, int], _StartingServer] = field(default_factory=dict)
    _ready: set[tuple[str, int]] = field(default_factory=set)
    _trainer_startup_phrase: str = "starts"
    _trainer_since: float = field(default_factory=time.time)
    _replicas_have_weights: bool = False

    @classmethod
    def from_events(cls, events: Iterable[dict[str, Any]]) -> RunPhaseTracker:
        phase = cls()
        for event in events:
            phase.add_event(event)
        return phase

    def add_event(self, event: dict[str, Any]) -> None:
        at, replica = float(event["time"]), (event["role"], int(event.get("replica", 0) or 0))
        match event["event"]:
            case "replica_started":
                self._starting[replica] = _StartingServer(at, str(event.get("log", "")))
            case "replica_ready":
                self._starting.pop(replica, None)
                self._ready.add(replica)
            case "replica_died":
                self._starting.pop(replica, None)
                self._ready.discard(replica)
            case "job_submitted" if event.get("job") == "trainer":
                self._restart_trainer("starts", at)
            case "ranks_joined":
                self._restart_trainer("loads the model", at)
            case "state_loaded":
                self._trainer_startup_phrase, self._trainer_since = "", at
            case "weights_published":
                self._replicas_have_weights |= bool(event.get("replicas"))

    def _restart_trainer(self, phrase: str, at: float) -> None:
        self._trainer_startup_phrase, self._trainer_since = phrase, at
        self._replicas_have_weights = False

    def describe(self, ledger: LedgerStatus | None) -> str:
        """The phase in one line; empty if only the ledger could tell, and it does not answer."""
        if not self._ready and self._starting:
            return self._describe_starting_server()
        if self._trainer_startup_phrase:
            return f"the trainer {self._trainer_startup_phrase}, {_format_age(self._trainer_since)}"
        if not self._ready:
            return "the cells start"
        if not self._replicas_have_weights:
            return f"replicas get the trainer's weights, {_format_age(self._trainer_since)}"
        return describe_phase_by_ledger_counts(ledger) if ledger is not None else ""

    def _describe_starting_server(self) -> str:
        (cell, number), server = min(self._starting.items(), key=lambda item: item[1].since)
        others = len(self._starting) - 1
        more = f", and {others} more" if others else ""
        phase = read_server_phase(Path(server.log)) if server.log else "starts"
        return f"SGLang {number} of {cell} {phase}, {_format_age(server.since)}{more}"


def read_server_phase(log: Path) -> str:
    try:
        text = read_tail_lines(log, SERVER_LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return "starts"
    at, words = max((text.rfind(sign), words) for sign, words in _SERVER_PHASES)
    return words if at >= 0 else "starts"


def describe_phase_by_ledger_counts(ledger: LedgerStatus) -> str:
    slowest_s = ledger.slowest_episode_s
    slowest = f", slowest {format_duration(slowest_s)}" if slowest_s >= 1.0 else ""
    if ledger.eval_total > ledger.eval_done:
        of = f"{ledger.eval_done} of {ledger.eval_total}"
        return f"evaluation of step {ledger.version_step}: {of} held-out episodes{slowest}"
    if ledger.formed_step > ledger.version_step:
        return f"step {ledger.formed_step} is trained"
    done = f"{ledger.episodes_done} of {ledger.episodes_wanted} episodes"
    return f"generation for step {ledger.version_step + 1}: {done}{slowest}"


def _format_age(since: float) -> str:
    return format_duration(time.time() - since)
