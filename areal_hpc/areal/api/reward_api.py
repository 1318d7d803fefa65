"""Reward functions that block."""

from areal_hpc.rollout.reward import AsyncRewardWrapper

__all__ = ["AsyncRewardWrapper"]
