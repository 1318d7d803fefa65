"""AReaL's `areal.reward.gsm8k` (re-exports)."""

from areal_hpc.reward.gsm8k import gsm8k_reward_fn

__all__ = ["gsm8k_reward_fn"]
