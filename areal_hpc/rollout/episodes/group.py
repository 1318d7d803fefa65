"""Group of episodes of one ticket: run concurrently, then filtered."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from areal_hpc.errors import AgentError
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.episodes.episode import EpisodeOutcome


async def run_group(
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
        Exception: What else an episode raised.
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


def load_group_filter(rollout: RolloutConfig) -> Callable[[dict[str, Any], Sequence[float]], str]:
    """The filters that a recipe names: why a group is not trained, empty if it is.

    They are given the task and the rewards of the episodes. The filter raises AgentError if the
    user's function raises, or returns neither true nor false.

    Raises:
        RecipeError: The user's function cannot be imported.
    """
    name = rollout.should_accept
    accept = load_user_function(name, "rollout.should_accept") if name else None

    def find_rejection(task: dict[str, Any], rewards: Sequence[float]) -> str:
        if rollout.filter_same_reward and len(set(rewards)) == 1:
            return f"all {len(rewards)} rewards are {rewards[0]:g}"
        if accept is None:
            return ""
        try:
            answer = accept({"rewards": np.asarray(rewards, dtype=np.float32), "task": task})
        except Exception as error:  # boundary: the function is the user's code
            raise AgentError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool | np.bool_):
            raise AgentError(
                f"{name} returned {answer!r:.200} ({type(answer).__name__}), expected a bool"
            )
        return "" if answer else f"{name} rejected the rewards {list(rewards)}"

    return find_rejection
