"""AReaL's `areal.api.reward_api` (re-exports)."""

from areal_hpc.rollout.reward import AsyncRewardWrapper

__all__ = ["AsyncRewardWrapper"]
