"""Slow episodes and blocks of the event loop are reported with the line of the agent."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.rollout import episode_watch
from areal_hpc.rollout.episode_watch import EVENT_LOOP_BLOCKED_S
from tests.integration.rollout.test_driver import Cell, tickets
from tests.integration.rollout.test_episode import ask
from tests.support.deadlines import Deadline, scaled


def test_agent_that_blocks_the_loop_is_reported_with_its_line_while_it_does(
    tmp_path: Path,
) -> None:
    told_meanwhile: list[dict[str, Any]] = []

    class Blocks:
        async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
            await ask(extra_kwargs)
            deadline = Deadline(10 * EVENT_LOOP_BLOCKED_S)
            while not (events := cell.events("event_loop_blocked")) and not deadline.is_over():
                time.sleep(0.05)
            told_meanwhile.extend(events)
            return 1.0

    cell = Cell(tmp_path, Blocks(), tickets(1, n_samples=1), n_samples=1)
    cell.run()
    (blocked,) = cell.events("event_loop_blocked")
    first = Blocks.run.__code__.co_firstlineno
    file, line = blocked["at"].rsplit(":", 1)
    assert (file, int(line) - first in (3, 4)) == (__file__, True)
    assert (blocked["task"], blocked["episode"]) == (0, 0)
    assert blocked["seconds"] >= EVENT_LOOP_BLOCKED_S
    assert told_meanwhile == [blocked]


def test_an_episode_that_hangs_is_reported_with_the_line_it_waits_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_watch, "SLOW_EPISODE_S", scaled(0.3))

    class Hangs:
        async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
            await self.wait_for_nobody()
            return 1.0

        async def wait_for_nobody(self) -> None:
            await asyncio.Event().wait()

    waits_at = f"{__file__}:{Hangs.wait_for_nobody.__code__.co_firstlineno + 1}"
    limit_s = scaled(3.0)
    cell = Cell(
        tmp_path, Hangs(), tickets(1, n_samples=1), n_samples=1,
        max_episode_tries=1, episode_timeout_s=limit_s,
    )  # fmt: skip
    cell.run()
    events = cell.events("episode_slow")
    assert [event["at"] for event in events] == [waits_at] * len(events)
    ages = [event["seconds"] for event in events]
    assert len(ages) >= 2
    # Events give ages to a tenth of a second.
    assert all(late >= 1.9 * early - 0.1 for early, late in itertools.pairwise(ages)), ages
    assert events[0]["limit_s"] == limit_s
    (ended,) = cell.events("episode_timed_out")
    assert ended["at"] == waits_at
