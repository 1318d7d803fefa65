"""M2PO (arXiv:2510.01161, section 5.2): r A, without tokens of the largest second moment.

r = pi/pi_b. Looked at are the tokens that the update takes further from pi_b (r > 1 with A > 0,
r < 1 with A < 0). Of these, those with the largest (log r)^2 leave until the mean of (log r)^2
over those that remain is at most `MAX_SECOND_MOMENT` (algorithm 1, equation 5). The paper takes
that mean over a batch; here it is taken over each row, so that it does not depend on which rows
share a pass.
Use it with `off_policy_correction=none`: the term corrects for pi_b itself.
"""

import torch

from areal_hpc.trainer.objective.custom_loss import LossInputs, LossOutputs

MAX_SECOND_MOMENT = 0.04
"""The paper's."""
HALVINGS = 40


def compute_terms(inputs: LossInputs) -> LossOutputs:
    """r A where a token stays, 0 elsewhere."""
    log_ratio_N = inputs.logprobs_N - inputs.behavior_N
    square_N = log_ratio_N.detach().square()
    goes_further_N = log_ratio_N.detach() * inputs.advantages_N > 0

    # The largest bound of each row that keeps its mean low enough: every rank halves alike.
    low_N = torch.full_like(square_N, MAX_SECOND_MOMENT)  # what is smaller lowers no mean by going
    high_N = torch.full_like(square_N, 1e4)
    for _ in range(HALVINGS):
        middle_N = (low_N + high_N) / 2
        stays_N = (goes_further_N & (square_N <= middle_N)).to(square_N.dtype)
        excess_N = inputs.rows.compute_row_means(stays_N * (square_N - MAX_SECOND_MOMENT))
        low_N = torch.where(excess_N <= 0, middle_N, low_N)
        high_N = torch.where(excess_N <= 0, high_N, middle_N)
    gone_N = goes_further_N & (square_N > low_N)
    return LossOutputs(torch.where(gone_N, 0.0, log_ratio_N.exp() * inputs.advantages_N), gone_N)
