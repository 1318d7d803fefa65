"""Failures that the events of a run tell of: its agent's, its servers', processes' and jobs'."""

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.errors import AgentError, ClusterError, RecipeError, ShardError
from areal_hpc.view.events.agent_failures import AgentFailures
from areal_hpc.view.events.run_news import describe_blocked_loop, describe_slow_episode

LOGS_HINT = "areal-hpc logs RUN shows the last lines of every process"
MEMORY_HINT = "request more memory for that job, or reduce its load"
MAX_AGENT_CAUSES = 5
MAX_SIGNAL_NOTE_DELAY_S = 2.0
"""A signal that ended a process is noted so long after the tracebacks that it brought about."""

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
    """Unix time; None if that is not known."""
    text: str
    distance_from_cause: int
    """Distance from the cause: of the findings of one failure the lowest names it."""
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
    """Events that are not routine: what, by which role, how often; the most frequent first."""
    counts = Counter(
        (str(one.get("event")), str(one.get("role")))
        for one in events
        if one.get("event") not in ROUTINE_EVENTS
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
                yield FailureEvent(row["time"], f"the agent {describe_blocked_loop(row)}", 7)
            case "episode_slow":
                yield FailureEvent(row["time"], f"the agent {describe_slow_episode(row)}", 7)
            case event if event in _RECOVERY_PHRASE_BY_EVENT:
                why = f": {row['reason'].splitlines()[-1]}" if row.get("reason") else ""
                text = f"{row['role']} {_RECOVERY_PHRASE_BY_EVENT[event]}{why}"
                yield FailureEvent(row["time"], text, distance_from_cause=8)


def _build_exit_event(row: dict[str, Any], first_traceback_at: float | None) -> FailureEvent:
    code = int(row.get("exit_code", 0))
    text = f"{row.get('process', 'a process')} of {row['role']} ended: {describe_exit_code(code)}"
    # A signal that came before the first traceback is the cause of it.
    is_first = (
        first_traceback_at is None or row["time"] <= first_traceback_at + MAX_SIGNAL_NOTE_DELAY_S
    )
    hint = MEMORY_HINT if code == 128 + signal.SIGKILL else LOGS_HINT
    return FailureEvent(row["time"], text, 2 if code > 128 and is_first else 5, hint=hint)


def build_agent_failure_events(
    failures: AgentFailures, end_reasons: Sequence[str]
) -> Iterator[FailureEvent]:
    """Failures of the user's agent; they are the cause where they ended the run, or never cease.

    `end_reasons` are what processes said as they ended for good.
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
    also = ", which usually means out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{also}"
