"""Lite PPO (arXiv:2508.08221): PPO's clip, and two keys of the recipe.

What makes it are `baseline=group_mean` with `scale_rewards=batch`, and `loss_agg=token_mean`: the
mean of the group, the deviation of the batch, every token alike. (The deviation is that of the
differences from the groups' means; TRL's `scale_rewards="batch"` takes that of the rewards, which
makes one factor for a batch.) The clip is PPO's (arXiv:1707.06347, equation 7), the same on both
sides, which `clip_low` and `clip_high` would do as well: take this file as the one to begin a loss
of your own with.
"""

import torch

from areal_hpc.trainer.objective.custom_loss import LossInputs, LossOutputs

CLIP = 0.2


def compute_terms(inputs: LossInputs) -> LossOutputs:
    """min(r A, clip(r) A)."""
    ratio_N = (inputs.logprobs_N - inputs.proximal_N).exp()
    free_N = ratio_N * inputs.advantages_N
    bound_N = ratio_N.clamp(1 - CLIP, 1 + CLIP) * inputs.advantages_N
    return LossOutputs(torch.minimum(free_N, bound_N), bound_N < free_N)
