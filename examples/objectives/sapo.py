"""SAPO, soft adaptive policy optimization (arXiv:2511.20347, section 3): a soft gate for the clip.

The term is 4/tau sigmoid(tau (r - 1)) A. Its gradient is that of r A at r = 1 and fades as r moves
away, sooner where A < 0. Use it with `trainer.minibatches` above 1, or `proximal=none` and
`off_policy_correction=none`: elsewhere every r is 1. The paper averages over the tokens of each
reply first, which is `loss_agg=seq_mean_token_mean`.
"""

import torch

from areal_hpc.trainer.objective.custom_loss import LossInputs, LossOutputs

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05
"""The paper's values."""


def compute_terms(inputs: LossInputs) -> LossOutputs:
    """4/tau sigmoid(tau (r - 1)) A, with tau by the sign of A."""
    ratio_N = (inputs.logprobs_N - inputs.proximal_N).exp()
    tau_N = torch.full_like(ratio_N, TAU_NEGATIVE)
    tau_N[inputs.advantages_N > 0] = TAU_POSITIVE
    return LossOutputs(4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)) * inputs.advantages_N)
