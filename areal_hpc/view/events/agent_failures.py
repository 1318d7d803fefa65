"""Failures of the user's agent as the drivers report them: each cause once, with counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.metrics.step_metrics import FAILED_TRY_EVENTS

EPISODES_COUNTED_EVENT = "episodes_counted"
"""Tells once after a failure how many episodes of a driver have ended by then."""
TRACEBACK_HEADER = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES = 12
MIN_FAILURES_TO_BLAME_AGENT = 3


@dataclass(slots=True)
class FailureCause:
    message: str
    place: str
    """`FILE:LINE` in the agent; empty if it is not known."""
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
    """By kind and line, in the order in which they appeared."""
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
        """Count an event of any kind; its cause if none failed by that before."""
        if event["event"] not in (*FAILED_TRY_EVENTS, EPISODES_COUNTED_EVENT):
            return None
        failed, ended = self._counts.get(event["role"], (0, 0))
        failed = max(failed, _get_count_or_one(event, "failed"))
        ended = max(ended, failed, _get_count_or_one(event, "ended"))
        self._counts[event["role"]] = failed, ended
        if event["event"] == EPISODES_COUNTED_EVENT:
            return None
        reason = str(event.get("reason", ""))
        message = str(event.get("message") or reason.partition("\n")[0])
        place, at = str(event.get("at", "")), float(event["time"])
        key = (str(event.get("kind", message)), place)
        if (known := self.causes.get(key)) is not None:
            known.count += 1
            known.last_at = at
            return None
        hint = str(event.get("hint", ""))
        self.causes[key] = FailureCause(message, place, hint, reason, at, at)
        return self.causes[key]


def _get_count_or_one(event: dict[str, Any], field_name: str) -> int:
    count = event.get(field_name)
    return count if isinstance(count, int) else 1
