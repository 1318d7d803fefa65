"""Watch over a driver's episodes: those that run for long, and whoever blocks the event loop."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.rollout.execution.agent_errors import find_running_line, find_waiting_line
from areal_hpc.rundir.telemetry.events import EventLog

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Between two signs of life of the event loop."""
EVENT_LOOP_BLOCKED_S = 2.0
"""An event loop that stood still for so long is reported: leases depend on it."""
COUNT_REPORT_DELAY_S = 1.0
"""Between a failure and the event that tells how many episodes ended well after it."""
SLOW_EPISODE_S = 30.0
"""An episode is reported as slow once it has run for so long..."""
SLOW_TO_LONGEST_RATIO = 3.0
"""...and for so many times as long as every one that ended well."""


@dataclass(slots=True)
class RunningEpisode:
    facts: dict[str, Any]
    """What events say of it."""
    began_at: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at


class EpisodeWatch:
    """Keeps the episodes under way, and records slow ones, and blocks of the event loop."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.ended = self.failed = 0
        """Episodes that ended, and those among them that failed by the agent's fault."""
        self._running: dict[str, RunningEpisode] = {}  # by the name of the agent's asyncio task
        self._longest_ok_s = 0.0
        self._reported: RunningEpisode | None = None
        self._reported_age_s = 0.0
        self._beat_at = time.monotonic()
        self._failed_at = 0.0
        self._ended_at_failure: int | None = None

    @property
    def oldest_running_age_s(self) -> float:
        return max((one.age_s for one in self._running.values()), default=0.0)

    @contextmanager
    def follow_episode(
        self, asyncio_task_name: str, ticket_facts: dict[str, Any]
    ) -> Iterator[RunningEpisode]:
        """Within the context an episode is under way, whose agent runs in the task of that name."""
        self._running[asyncio_task_name] = episode = RunningEpisode(ticket_facts)
        try:
            yield episode
        finally:
            del self._running[asyncio_task_name]

    def record_good_end(self, took_s: float) -> None:
        self.ended += 1
        self._longest_ok_s = max(self._longest_ok_s, took_s)

    def record_failed_end(self) -> None:
        self.ended += 1
        self.failed += 1
        self._failed_at, self._ended_at_failure = time.monotonic(), self.ended

    async def run(self) -> None:
        """Watch until cancelled."""
        loop, has_ended = asyncio.get_running_loop(), threading.Event()
        self._beat_at = time.monotonic()
        arguments = (loop, threading.get_ident(), has_ended)
        threading.Thread(target=self._watch_event_loop, args=arguments, daemon=True).start()
        try:
            while True:
                self._beat_at = time.monotonic()
                self._report_slow_episode()
                self._report_counts_once_after_failure()
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            has_ended.set()

    def _report_counts_once_after_failure(self) -> None:
        before, since_s = self._ended_at_failure, time.monotonic() - self._failed_at
        if before is not None and self.ended > before and since_s >= COUNT_REPORT_DELAY_S:
            self._ended_at_failure = None
            self._events.record("episodes_counted", failed=self.failed, ended=self.ended)

    def _report_slow_episode(self) -> None:
        if not self._running:
            return
        name, oldest = min(self._running.items(), key=lambda item: item[1].began_at)
        limit_s = max(SLOW_EPISODE_S, SLOW_TO_LONGEST_RATIO * self._longest_ok_s)
        if oldest is self._reported:
            limit_s = max(limit_s, 2 * self._reported_age_s)
        if (age_s := oldest.age_s) < limit_s:
            return
        self._reported, self._reported_age_s = oldest, age_s
        waiting = next((one for one in asyncio.all_tasks() if one.get_name() == name), None)
        place = find_waiting_line(waiting) if waiting else ""
        self._events.record("episode_slow", **oldest.facts, seconds=round(age_s, 1), at=place)
        log.warning("episode %s has run for %.0f s; it waits at %s", name, age_s, place or "?")

    def _watch_event_loop(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, has_ended: threading.Event
    ) -> None:
        """In a thread: it sees what the event loop cannot, that it stands still and in which line.

        A block is told while it lasts, and again each time it has lasted twice as long.
        """
        told_s, looked_at = 0.0, time.monotonic()
        while not has_ended.wait(HEARTBEAT_S):
            now = time.monotonic()
            if now - looked_at > HEARTBEAT_S + EVENT_LOOP_BLOCKED_S / 2:
                self._beat_at = now  # the whole process stood still
            looked_at, still_s = now, now - self._beat_at
            if still_s < EVENT_LOOP_BLOCKED_S:
                told_s = 0.0
            elif still_s >= 2 * told_s:
                told_s = still_s
                self._report_blocked_loop(loop, thread_id, still_s)

    def _report_blocked_loop(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, seconds: float
    ) -> None:
        frame = sys._current_frames().get(thread_id)
        task = asyncio.current_task(loop)
        episode = self._running.get(task.get_name()) if task else None
        place = find_running_line(frame)
        facts = episode.facts if episode else {}
        self._events.record("event_loop_blocked", **facts, seconds=round(seconds, 2), at=place)
        log.warning(
            "the agent has blocked the event loop for %.1f s at %s; wrap blocking code in "
            "`await asyncio.to_thread(...)`",
            *(seconds, place),
        )
