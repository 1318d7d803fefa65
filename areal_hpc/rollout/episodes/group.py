"""Group of episodes of one ticket: run concurrently, then filtered."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_hpc.errors import AgentError
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.episodes.episode import EpisodeOutcome

ShouldAccept = Callable[[dict[str, Any]], object]
"""Given `{"rewards": float32 array, one per episode; "task": the row of the task set}`."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Result of a ticket's episodes."""

    outcomes: list[EpisodeOutcome]
    """Of those that make the group, in the order of their places."""
    n_surplus_episodes: int
    """Episodes that were not waited for, or not needed."""
    failed: list[AgentError]
    """Why the others are missing."""


async def run_group_until_enough_succeed(
    episodes: Sequence[Coroutine[Any, Any, EpisodeOutcome]],
    wanted_successes: int,
    min_successes: int,
) -> GroupResult:
    """Run episodes until the first `wanted_successes` ended well; the rest is cancelled.

    Each ends well, or raises AgentError when it failed for good.

    Raises:
        AgentError: Fewer than `min_successes` can still end well.
        RecipeError: There is no such task.
    """
    tasks = [asyncio.create_task(episode) for episode in episodes]
    pending, failed = set(tasks), list[AgentError]()
    try:
        while pending and len(tasks) - len(pending) - len(failed) < wanted_successes:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed += [
                _get_agent_error_or_raise(task) for task in done if task.exception() is not None
            ]
            if len(tasks) - len(failed) < min_successes:
                raise failed[-1]
    finally:
        await _cancel_and_await_all(tasks)
    good = [task for task in tasks if task not in pending and task.exception() is None]
    outcomes = [task.result() for task in good[:wanted_successes]]
    return GroupResult(outcomes, len(tasks) - len(failed) - len(outcomes), failed)


async def _cancel_and_await_all(tasks: Iterable[asyncio.Task[EpisodeOutcome]]) -> None:
    for task in tasks:
        task.cancel()
    ends = asyncio.gather(*tasks, return_exceptions=True)
    interruption: asyncio.CancelledError | None = None
    while not ends.done():
        try:
            await asyncio.shield(ends)
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        raise interruption


def _get_agent_error_or_raise(task: asyncio.Task[EpisodeOutcome]) -> AgentError:
    error = task.exception()
    if isinstance(error, AgentError):
        return error
    assert error is not None
    raise error


class GroupFilter:
    """Decides whether the group of a ticket is trained, by the filters that the recipe names.

    Raises:
        RecipeError: The user's function cannot be imported.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._name = rollout.should_accept
        self._should_accept: ShouldAccept | None = (
            load_user_function(self._name, "rollout.should_accept") if self._name else None
        )
        self._filter_same_reward = rollout.filter_same_reward

    def get_rejection_reason(self, task: dict[str, Any], rewards: Sequence[float]) -> str:
        """Why the group is not trained; empty if it is.

        `rewards` has all of each episode, added up.

        Raises:
            AgentError: The user's function raised, or returned neither true nor false.
        """
        if self._filter_same_reward and len(set(rewards)) == 1:
            return f"all {len(rewards)} rewards are {rewards[0]:g}"
        if self._should_accept is None:
            return ""
        try:
            answer = self._should_accept(
                {"rewards": np.asarray(rewards, dtype=np.float32), "task": task}
            )
        except Exception as error:  # boundary: the function is the user's code
            raise AgentError(f"{self._name} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool | np.bool_):
            raise AgentError(
                f"{self._name} returned {answer!r:.200} ({type(answer).__name__}), expected a bool"
            )
        return "" if answer else f"{self._name} rejected the rewards {list(rewards)}"
