"""What ready agents have in common: how their last words become a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_hpc.rollout.reward import AsyncRewardWrapper
from areal_hpc.utils.dynamic_import import import_from_string

GSM8K = "areal_hpc.reward.gsm8k.gsm8k_reward_fn"


class Judge:
    """A reward function of AReaL's signature, in processes of its own.

    Args:
        reward_fn_path: Its dotted path, `package.module.function`; `areal.` is this package's root.

    Raises:
        ImportError: There is no such function.
    """

    def __init__(self, reward_fn_path: str = GSM8K) -> None:
        self._reward = AsyncRewardWrapper(import_from_string(reward_fn_path))

    async def __call__(self, text: str, task: Mapping[str, Any]) -> float:
        """The reward of a reply to a task, whose keys beside `messages` the function gets."""
        given = {name: value for name, value in task.items() if name != "messages"}
        return await self._reward(task["messages"], text, None, None, **given)
