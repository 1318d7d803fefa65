"""Watch over a driver's episodes, which reports slow ones and blocks of the event loop."""

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
"""Time between two heartbeats of the event loop."""
EVENT_LOOP_BLOCKED_S = 2.0
"""Time without a heartbeat after which a block is reported: leases depend on the event loop."""
COUNT_REPORT_DELAY_S = 1.0
"""Time between a failure and the event with the numbers of ended and failed episodes."""
SLOW_EPISODE_S = 30.0
"""Least running time of an episode that is reported as slow."""
SLOW_TO_LONGEST_RATIO = 3.0
"""Least ratio of its running time to that of the longest successful episode."""


@dataclass(slots=True)
class RunningEpisode:
    facts: dict[str, Any]
    """Fields of the events about it."""
    began_at: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at


class EpisodeWatch:
    """Table of running episodes; it records slow ones and blocks of the event loop."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.ended = self.failed = 0
        """Numbers of episodes that ended, and of those that failed by the agent's fault."""
        self._running: dict[str, RunningEpisode] = {}  # by the name of the agent's asyncio task
        self._longest_ok_s = 0.0
        self._reported: RunningEpisode | None = None
        self._reported_age_s = 0.0
        self._beat_at = time.monotonic()
        self._failed_at = 0.0
        self._ended_at_failure: int | None = None

    @property
    def oldest_running_age_s(self) -> float:
        return max((episode.age_s for episode in self._running.values()), default=0.0)

    @contextmanager
    def follow_episode(
        self, asyncio_task_name: str, ticket_facts: dict[str, Any]
    ) -> Iterator[RunningEpisode]:
        """Keep an episode as running within the context; its agent runs in the asyncio task."""
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
        waiting = next((task for task in asyncio.all_tasks() if task.get_name() == name), None)
        line = find_waiting_line(waiting) if waiting else ""
        self._events.record("episode_slow", **oldest.facts, seconds=round(age_s, 1), at=line)
        log.warning("episode %s has run for %.0f s; it waits at %s", name, age_s, line or "?")

    def _watch_event_loop(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, has_ended: threading.Event
    ) -> None:
        """Watch the event loop from a thread, which runs on while the loop is blocked.

        A block is reported while it lasts, and again each time it has lasted twice as long.
        """
        reported_s, checked_at = 0.0, time.monotonic()
        while not has_ended.wait(HEARTBEAT_S):
            now = time.monotonic()
            if now - checked_at > HEARTBEAT_S + EVENT_LOOP_BLOCKED_S / 2:
                self._beat_at = now  # the whole process stood still
            checked_at, blocked_s = now, now - self._beat_at
            if blocked_s < EVENT_LOOP_BLOCKED_S:
                reported_s = 0.0
            elif blocked_s >= 2 * reported_s:
                reported_s = blocked_s
                self._report_blocked_loop(loop, thread_id, blocked_s)

    def _report_blocked_loop(
        self, loop: asyncio.AbstractEventLoop, thread_id: int, seconds: float
    ) -> None:
        frame = sys._current_frames().get(thread_id)
        task = asyncio.current_task(loop)
        episode = self._running.get(task.get_name()) if task else None
        line = find_running_line(frame)
        facts = episode.facts if episode else {}
        self._events.record("event_loop_blocked", **facts, seconds=round(seconds, 2), at=line)
        log.warning(
            "the agent has blocked the event loop for %.1f s at %s; wrap blocking code in "
            "`await asyncio.to_thread(...)`",
            *(seconds, line),
        )
