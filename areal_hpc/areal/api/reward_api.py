"""AReaL's `areal.api.reward_api` (re-exports)."""

from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper

__all__ = ["AsyncRewardWrapper"]
