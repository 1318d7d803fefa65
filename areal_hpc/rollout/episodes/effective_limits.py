"""Limits of an episode: from the recipe, overridden by its task."""

from typing import Annotated, Any

from pydantic import Field, ValidationError

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import EpisodeLimitsConfig, RolloutConfig

TASK_LIMITS_KEY = "limits"
"""Where the row of a task has limits of its own."""


class EpisodeLimits(EpisodeLimitsConfig):
    """Limits of one episode."""

    timeout_s: Annotated[float, Field(gt=0)]
    """How long it may take."""


def resolve_limits(rollout: RolloutConfig, task: dict[str, Any]) -> EpisodeLimits:
    """The recipe's limits, overridden by those of the task.

    Raises:
        RecipeError: The task's limits are none.
    """
    recipe = {**rollout.limits.model_dump(), "timeout_s": rollout.episode_timeout_s}
    own = task.get(TASK_LIMITS_KEY, {})
    try:
        if not isinstance(own, dict):
            raise TypeError(f"got {own!r:.100}")
        return EpisodeLimits.model_validate(recipe | own)
    except (TypeError, ValidationError) as error:
        raise RecipeError(
            f"the task's limits cannot be read: {error}",
            key=TASK_LIMITS_KEY,
            hint=f"give any of {', '.join(recipe)}, or rename that key of the task",
        ) from error


def check_task_limits(
    rollout: RolloutConfig, session_timeout_s: float, task: dict[str, Any]
) -> None:
    """Demand that a task's own limits can be read, and that its sessions outlive its episodes.

    An episode that ended well waits in its session for the others of its group, and the proxy keeps
    a session that nobody uses for `session_timeout_s`.

    Raises:
        RecipeError: They cannot.
    """
    if TASK_LIMITS_KEY not in task:
        return
    tries, timeout_s = rollout.max_episode_tries, resolve_limits(rollout, task).timeout_s
    if session_timeout_s < timeout_s * tries:
        raise RecipeError(
            f"proxy.session_timeout_s={session_timeout_s:.0f} is less than the "
            f"{timeout_s * tries:.0f} s that {tries} tries of {timeout_s:g} s take",
            key=TASK_LIMITS_KEY,
            hint=f"use proxy.session_timeout_s={timeout_s * tries:.0f} or more",
        )
