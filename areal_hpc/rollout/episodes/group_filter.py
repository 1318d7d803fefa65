"""Filters of finished groups: by equal rewards, or by the user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areal_hpc.errors import AgentError
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.user_functions import load_user_function

ShouldAccept = Callable[[dict[str, Any]], object]
"""Given `{"rewards": float32 array, one per episode; "task": the row of the task set}`."""

SHOULD_ACCEPT_KEY = "rollout.should_accept"


class GroupFilter:
    """Decides whether the group of a ticket is trained."""

    def __init__(self, rollout: RolloutConfig) -> None:
        """Prepare.

        Args:
            rollout: Names the filters.

        Raises:
            RecipeError: The user's function cannot be imported.
        """
        self._name = rollout.should_accept
        self._should_accept: ShouldAccept | None = (
            load_user_function(self._name, SHOULD_ACCEPT_KEY) if self._name else None
        )
        self._filter_same_reward = rollout.filter_same_reward

    def get_rejection_reason(self, task: dict[str, Any], rewards: Sequence[float]) -> str:
        """Why the group is not trained; empty if it is.

        Args:
            task: What its episodes worked on.
            rewards: Of each episode: that of its last interaction that has one.

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
