"""What happens in a run that a person should hear of at once, told once."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.jobs.restart_policy import PERMANENT_EXIT_CODES
from areal_hpc.rundir.telemetry import events as telemetry
from areal_hpc.view.events.agent_failures import AgentFailures, FailureCause
from areal_hpc.view.tables import format_duration

MAX_SHOWN_CAUSES = 5
_EVENTS_ANNOUNCED_ONCE_PER_PLACE = ("event_loop_blocked", "episode_slow")


@dataclass(slots=True)
class NewEventLineFormatter:
    failures: AgentFailures = field(default_factory=AgentFailures)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def describe_if_new(self, event: dict[str, Any]) -> list[str]:
        if (cause := self.failures.add_event(event)) is not None:
            return list(
                self._format_failure_lines(cause, str(event.get("then", "it is tried again")))
            )
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


def describe_blocked_loop(event: dict[str, Any]) -> str:
    seconds, place = _format_seconds(event), event.get("at")
    at = f" at {place}" if place else ""
    return f"blocks the event loop{at} for {seconds} so far{_describe_episode(event)}"


def describe_slow_episode(event: dict[str, Any]) -> str:
    place, limit_s = event.get("at"), event.get("limit_s")
    at = f", waiting at {place}" if place else ""
    limit = f"; the limit is {format_duration(limit_s)}" if isinstance(limit_s, int | float) else ""
    age = _format_seconds(event)
    return f"has run for {age} without an end{at}{_describe_episode(event)}{limit}"


def _format_event_lines(event: dict[str, Any]) -> Iterator[str]:
    role = event["role"]
    match event["event"]:
        case "event_loop_blocked":
            yield f"agent    {describe_blocked_loop(event)}"
            yield "         try: wrap blocking code in `await asyncio.to_thread(...)`"
        case "episode_slow":
            yield f"agent    {describe_slow_episode(event)}"
        case "replica_died":
            server = f"SGLang {event.get('replica', '?')} of {role}"
            yield f"server   {server} {event.get('reason', 'died')}; it is started again"
            if event.get("last_line"):
                yield f"         {event['last_line']}"
            if event.get("log"):
                yield f"         read {event['log']}"
        case telemetry.RANKS_HANG_EVENT:
            yield f"trainer  stands still: {event.get('ranks', 'no rank is known to move')}"
            yield "         read the stacks at the end of those ranks' logs in logs/latest"
        case "process_exited":
            code = event.get("exit_code", "?")
            # Of the others the command ends with that error, in better words.
            if code not in PERMANENT_EXIT_CODES:
                process = event.get("process", "?")
                yield f"process  {process} of {role} ended with exit code {code}"
        case "state_loaded" if step := event.get("step"):
            yield f"resumed  from the checkpoint of step {step}"


def _describe_episode(event: dict[str, Any]) -> str:
    if "task" not in event:
        return ""
    split = "held-out task" if event.get("eval_step", -1) >= 0 else "task"
    return f" (episode {event.get('episode', '?')} of {split} {event['task']})"


def _format_seconds(event: dict[str, Any]) -> str:
    seconds = event.get("seconds")
    return format_duration(seconds) if isinstance(seconds, int | float) else "long"
