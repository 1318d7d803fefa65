"""Text from a run's events: failures by cause, the present phase, lines for the terminal."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.errors import AgentError, ClusterError, RecipeError, ShardError
from areal_hpc.jobs.restarts import PERMANENT_EXIT_CODES
from areal_hpc.metrics.step_metrics import FAILED_TRY_EVENTS
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.rundir.telemetry import events as telemetry
from areal_hpc.view.formatting import format_duration
from areal_hpc.wire.ledger import LedgerStatus

EPISODES_COUNTED_EVENT = "episodes_counted"
"""Event that reports, once after a failure, how many episodes of a driver have ended."""
TRACEBACK_HEADER = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES = 12
MIN_FAILURES_TO_BLAME_AGENT = 3


@dataclass(slots=True)
class FailureCause:
    message: str
    place: str
    """`FILE:LINE` in the agent; empty if unknown."""
    hint: str
    message_with_traceback: str
    first_at: float
    last_at: float
    count: int = 1

    @property
    def text(self) -> str:
        return f"{self.message} at {self.place}" if self.place else self.message

    @property
    def traceback_lines(self) -> tuple[str, ...]:
        begin = self.message_with_traceback.find(TRACEBACK_HEADER)
        lines = self.message_with_traceback[begin:].splitlines() if begin >= 0 else []
        return tuple(lines[-MAX_TRACEBACK_LINES:])

    @property
    def suggested_fix(self) -> str:
        return self.hint or (f"fix {self.place}" if self.place else "fix the agent")


@dataclass(slots=True)
class AgentFailures:
    causes: dict[tuple[str, str], FailureCause] = field(default_factory=dict)
    """Causes by kind and line, in the order of appearance."""
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def collect(cls, events: Iterable[dict[str, Any]]) -> AgentFailures:
        failures = cls()
        for event in events:
            failures.add_event(event)
        return failures

    @property
    def failed(self) -> int:
        return sum(failed for failed, _ in self._counts.values())

    @property
    def ended(self) -> int:
        return sum(ended for _, ended in self._counts.values())

    @property
    def is_agent_always_failing(self) -> bool:
        return self.failed >= MIN_FAILURES_TO_BLAME_AGENT and self.failed == self.ended

    @property
    def newest(self) -> FailureCause | None:
        return max(self.causes.values(), key=lambda cause: cause.last_at, default=None)

    @property
    def share_text(self) -> str:
        return f"in {self.failed} of {self.ended} episode{'s' if self.ended != 1 else ''}"

    def add_event(self, event: dict[str, Any]) -> FailureCause | None:
        """Count an event of any kind; return its cause if nothing failed by it before."""
        if event["event"] not in (*FAILED_TRY_EVENTS, EPISODES_COUNTED_EVENT):
            return None
        failed, ended = self._counts.get(event["role"], (0, 0))
        failed = max(failed, _get_count(event, "failed"))
        ended = max(ended, failed, _get_count(event, "ended"))
        self._counts[event["role"]] = failed, ended
        if event["event"] == EPISODES_COUNTED_EVENT:
            return None
        reason = str(event.get("reason", ""))
        message = str(event.get("message") or reason.partition("\n")[0])
        place, happened_at = str(event.get("at", "")), float(event["time"])
        key = (str(event.get("kind", message)), place)
        if (known := self.causes.get(key)) is not None:
            known.count += 1
            known.last_at = happened_at
            return None
        hint = str(event.get("hint", ""))
        self.causes[key] = FailureCause(message, place, hint, reason, happened_at, happened_at)
        return self.causes[key]


def _get_count(event: dict[str, Any], field_name: str) -> int:
    count = event.get(field_name)
    return count if isinstance(count, int) else 1


LOGS_HINT = "areal-hpc logs RUN shows the last lines of every process"
MEMORY_HINT = "request more memory for that job, or reduce its load"
MAX_AGENT_CAUSES = 5
MAX_SIGNAL_NOTE_DELAY_S = 2.0
"""Seconds by which the record of a deadly signal may follow the tracebacks that it caused."""

_MEANING_BY_EXIT_CODE = {
    RecipeError.exit_code: "the recipe must change",
    ClusterError.exit_code: "a node, file system or service failed; a retry may succeed",
    ShardError.exit_code: "recorded data is damaged",
    AgentError.exit_code: "an error in code",
}
_RECOVERY_PHRASE_BY_EVENT = {
    "job_requeued": "requested another start from Slurm",
    "job_ended_by_Slurm": "was ended by Slurm",
    "job_idle": "released its nodes, as it had nothing to do",
    "job_not_requeued": "could not request another start from Slurm",
    "job_given_up": "submits a job no more that ended again and again without progress",
    "job_submitted_again": "submitted a job again that was gone",
    "job_released": "released a job that Slurm held",
}


@dataclass(frozen=True, slots=True)
class FailureEvent:
    at: float | None
    """Unix time; None if unknown."""
    text: str
    distance_from_cause: int
    """Distance from the cause; the event of a failure with the lowest distance names the cause."""
    details: tuple[str, ...] = ()
    hint: str = ""


ROUTINE_EVENTS = frozenset(
    {
        "episodes_counted",
        "job_submitted",
        "launcher_ended",
        "ranks_joined",
        "replica_resumed",
        "state_loaded",
        "weights_published",
    }
)


def count_unusual_events(
    events: Iterable[Mapping[str, Any]], max_kinds: int
) -> list[tuple[str, str, int]]:
    """Count events that are not routine by event and role, the most frequent first."""
    counts = Counter(
        (str(row.get("event")), str(row.get("role")))
        for row in events
        if row.get("event") not in ROUTINE_EVENTS
    )
    return [(event, role, count) for (event, role), count in counts.most_common(max_kinds)]


def collect_failure_events(
    events: Sequence[dict[str, Any]], first_traceback_at: float | None
) -> Iterator[FailureEvent]:
    for row in events:
        match row["event"]:
            case "process_exited":
                yield _build_exit_event(row, first_traceback_at)
            case "replica_died":
                text = (
                    f"SGLang {row.get('replica', '?')} of {row['role']} {row.get('reason', 'died')}"
                )
                if last_line := row.get("last_line"):
                    text = f"{text}: {last_line}"
                hint = f"read {row['log']}" if row.get("log") else LOGS_HINT
                yield FailureEvent(row["time"], text, distance_from_cause=3, hint=hint)
            case "weights_published" if row.get("failed") and not row.get("replicas"):
                text = f"no replica has taken weights {row['version']}: {row.get('reason') or '?'}"
                yield FailureEvent(row["time"], text, distance_from_cause=4, hint=LOGS_HINT)
            case "event_loop_blocked":
                place = f" at {row['at']}" if row.get("at") else ""
                text = f"the agent blocks the event loop{place} for {_format_seconds(row)} so far"
                hint = "wrap blocking code in `await asyncio.to_thread(...)`"
                yield FailureEvent(row["time"], text + _describe_episode(row), 7, hint=hint)
            case "episode_slow":
                at, limit_s = row.get("at"), row.get("limit_s")
                text = f"the agent has run for {_format_seconds(row)} without an end"
                text += f", waiting at {at}" if at else ""
                text += _describe_episode(row)
                if isinstance(limit_s, int | float):
                    text += f"; the limit is {format_duration(limit_s)}"
                yield FailureEvent(row["time"], text, 7, hint=LOGS_HINT)
            case event if event in _RECOVERY_PHRASE_BY_EVENT:
                why = f": {row['reason'].splitlines()[-1]}" if row.get("reason") else ""
                text = f"{row['role']} {_RECOVERY_PHRASE_BY_EVENT[event]}{why}"
                yield FailureEvent(row["time"], text, distance_from_cause=8)


def _build_exit_event(row: dict[str, Any], first_traceback_at: float | None) -> FailureEvent:
    code = int(row.get("exit_code", 0))
    text = f"{row.get('process', 'a process')} of {row['role']} ended: {describe_exit_code(code)}"
    # A signal before the first traceback has caused it.
    is_first = (
        first_traceback_at is None or row["time"] <= first_traceback_at + MAX_SIGNAL_NOTE_DELAY_S
    )
    hint = MEMORY_HINT if code == 128 + signal.SIGKILL else LOGS_HINT
    return FailureEvent(row["time"], text, 2 if code > 128 and is_first else 5, hint=hint)


def build_agent_failure_events(
    failures: AgentFailures, end_reasons: Sequence[str]
) -> Iterator[FailureEvent]:
    """Yield failures of the user's agent, as the cause if they ended the run or always occur.

    `end_reasons` are the reasons that processes gave when they ended for good.
    """
    newest = sorted(failures.causes.values(), key=lambda cause: cause.last_at)
    for cause in newest[-MAX_AGENT_CAUSES:]:
        has_ended_run = any(cause.message in reason for reason in end_reasons)
        yield FailureEvent(
            cause.last_at,
            f"{cause.text} ({failures.share_text})",
            distance_from_cause=1 if has_ended_run or failures.is_agent_always_failing else 8,
            details=cause.traceback_lines,
            hint=f"{cause.suggested_fix}, then run the same command again",
        )


def describe_exit_code(code: int) -> str:
    if code in _MEANING_BY_EXIT_CODE:
        return f"exit code {code} ({_MEANING_BY_EXIT_CODE[code]})"
    if code - 128 not in list(signal.Signals):
        return f"exit code {code}"
    name = signal.Signals(code - 128).name
    note = ", which usually means out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{note}"


def _describe_episode(event: dict[str, Any]) -> str:
    if "task" not in event:
        return ""
    split = "held-out task" if event.get("eval_step", -1) >= 0 else "task"
    return f" (episode {event.get('episode', '?')} of {split} {event['task']})"


def _format_seconds(event: dict[str, Any]) -> str:
    seconds = event.get("seconds")
    return format_duration(seconds) if isinstance(seconds, int | float) else "long"


MAX_SHOWN_CAUSES = 5
_EVENTS_ANNOUNCED_ONCE_PER_PLACE = ("event_loop_blocked", "episode_slow", "weights_published")
_SUBJECT_BY_EVENT = {
    **dict.fromkeys(_EVENTS_ANNOUNCED_ONCE_PER_PLACE, "agent"),
    "replica_died": "server",
    "process_exited": "process",
    "weights_published": "weights",
}
"""Subjects of events that the terminal shows at once, in the words of `areal-hpc why`."""


@dataclass(slots=True)
class NewEventLineFormatter:
    failures: AgentFailures = field(default_factory=AgentFailures)
    _announced: set[tuple[str, str]] = field(default_factory=set)

    def describe_news(self, event: dict[str, Any]) -> list[str]:
        if (cause := self.failures.add_event(event)) is not None:
            return list(
                self._format_failure_lines(cause, str(event.get("then", "it is tried again")))
            )
        if event["event"] == "weights_published" and event.get("replicas"):
            return []
        if event["event"] in _EVENTS_ANNOUNCED_ONCE_PER_PLACE:
            key = (event["event"], str(event.get("at") or event["role"]))
            if key in self._announced:
                return []
            self._announced.add(key)
        return list(_format_event_lines(event))

    def _format_failure_lines(self, cause: FailureCause, consequence: str) -> Iterator[str]:
        number = len(self.failures.causes)
        if number > MAX_SHOWN_CAUSES:
            if number == MAX_SHOWN_CAUSES + 1:
                yield "agent    fails in further ways: areal-hpc why RUN lists them"
            return
        message, share = cause.message.removeprefix("the agent "), self.failures.share_text
        yield f"agent    {message}  ({share} so far; {consequence})"
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
            pass  # the command itself ends with that error
        case name if name in _SUBJECT_BY_EVENT:
            for failure in collect_failure_events([event], None):
                again = "; it is started again" if name == "replica_died" else ""
                text = failure.text.removeprefix("the agent ") + again
                yield f"{_SUBJECT_BY_EVENT[name]:<8} {text}"
                yield f"         try: {failure.hint}"


SERVER_LOG_TAIL_BYTES = 16384
_SERVER_PHASES = (
    ("Load weight begin", "loads weights"),
    ("Load weight end", "allocates its cache"),
    ("Capture cuda graph begin", "captures CUDA graphs"),
    ("Engine startup timings", "warms up"),
)
"""Lines of SGLang's log (0.5.23), in their order, and the phase that each begins."""


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
        """Return the phase in one line; empty if it needs the ledger and that does not answer."""
        if not self._ready and self._starting:
            return self._describe_starting_server()
        if self._trainer_startup_phrase:
            return f"the trainer {self._trainer_startup_phrase}, {_format_age(self._trainer_since)}"
        if not self._ready:
            return "the cells start"
        if not self._replicas_have_weights:
            return f"replicas get the trainer's weights, {_format_age(self._trainer_since)}"
        return describe_ledger_phase(ledger) if ledger is not None else ""

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
    position, phase = max((text.rfind(line), phase) for line, phase in _SERVER_PHASES)
    return phase if position >= 0 else "starts"


def describe_ledger_phase(ledger: LedgerStatus) -> str:
    slowest_s = ledger.slowest_episode_s
    slowest = f", slowest {format_duration(slowest_s)}" if slowest_s >= 1.0 else ""
    if ledger.eval_total > ledger.eval_done:
        progress = f"{ledger.eval_done} of {ledger.eval_total}"
        return f"evaluation of step {ledger.version_step}: {progress} held-out episodes{slowest}"
    if ledger.formed_step > ledger.version_step:
        return f"step {ledger.formed_step} is trained"
    done = f"{ledger.episodes_done} of {ledger.episodes_wanted} episodes"
    return f"generation for step {ledger.version_step + 1}: {done}{slowest}"


def _format_age(since: float) -> str:
    return format_duration(time.time() - since)
