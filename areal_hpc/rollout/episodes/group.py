"""Group of episodes of one ticket: run concurrently, then filtered."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from areal_hpc.errors import AgentError
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.episodes.episode import EpisodeOutcome

ShouldAccept = Callable[[dict[str, Any]], object]
"""Given `{"rewards": float32 array, one per episode; "task": the row of the task set}`."""


async def run_group_until_enough_succeed(
    episodes: Sequence[Coroutine[Any, Any, EpisodeOutcome]],
    wanted_successes: int,
    min_successes: int,
) -> tuple[list[EpisodeOutcome], list[AgentError]]:
    """Run episodes until the first `wanted_successes` ended well; the rest is cancelled.

    Each ends well, or raises AgentError when it failed for good.

    Returns:
        The outcomes that make the group, in the order of their places, and the errors of others.

    Raises:
        AgentError: Fewer than `min_successes` can still end well.
        RecipeError: There is no such task.
    """
    tasks = [asyncio.create_task(episode) for episode in episodes]
    pending, failed = set(tasks), list[AgentError]()
    try:
        while pending and len(tasks) - len(pending) - len(failed) < wanted_successes:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for error in (task.exception() for task in done):
                if isinstance(error, AgentError):
                    failed.append(error)
                elif error is not None:
                    raise error
            if len(tasks) - len(failed) < min_successes:
                raise failed[-1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    good = [task for task in tasks if task not in pending and task.exception() is None]
    return [task.result() for task in good[:wanted_successes]], failed


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
