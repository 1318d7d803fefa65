"""Group of episodes of one ticket, run concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from areal_hpc.errors import AgentError
from areal_hpc.rollout.episodes.episode import EpisodeOutcome


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Result of a ticket's episodes."""

    outcomes: list[EpisodeOutcome]
    """Of those that make the group, in the order of their places."""
    cut: int
    """Episodes that were not waited for, or not needed."""
    failed: list[AgentError]
    """Why the others are missing."""


async def run_group(
    episodes: Sequence[Coroutine[Any, Any, EpisodeOutcome]], wanted: int, least: int
) -> GroupResult:
    """Run episodes until enough of them ended well; the rest is cancelled.

    Args:
        episodes: Each ends well, or raises AgentError when it failed for good.
        wanted: The first so many that end well make the group.
        least: So many are enough once all the others failed.

    Raises:
        AgentError: Fewer than `least` can still end well.
        RecipeError: There is no such task.
    """
    tasks = [asyncio.create_task(episode) for episode in episodes]
    pending, failed = set(tasks), list[AgentError]()
    try:
        while pending and len(tasks) - len(pending) - len(failed) < wanted:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed += [_failure(task) for task in done if task.exception() is not None]
            if len(tasks) - len(failed) < least:
                raise failed[-1]
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        for task in tasks:  # of several failures one is raised: the others are known as well
            if task.done() and not task.cancelled():
                task.exception()
    good = [task for task in tasks if task not in pending and task.exception() is None]
    outcomes = [task.result() for task in good[:wanted]]
    return GroupResult(outcomes, len(tasks) - len(failed) - len(outcomes), failed)


def _failure(task: asyncio.Task[EpisodeOutcome]) -> AgentError:
    error = task.exception()
    if isinstance(error, AgentError):
        return error
    assert error is not None
    raise error
