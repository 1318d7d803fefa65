"""Divergence from a reference policy, estimated at sampled tokens. d = log pi - log reference.

| estimator | of KL(pi || reference) | as a term of the loss |
|---|---|---|
| `k1` | d | its expected gradient is 0 |
| `k2` | d^2 / 2 | its gradient d * grad log pi is the divergence's in the mean |
| `k3` | exp(-d) - 1 + d | its expected gradient is that of KL(reference || pi) |

Names and definitions: joschu.net/blog/kl-approx. k3 in the loss is GRPO's (arXiv:2402.03300,
section 4.1.1).
"""

from typing import Literal

import torch


def estimate_divergence(
    logprobs_N: torch.Tensor, reference_N: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """The estimate at each token, in nats; the gradient flows through `logprobs_N`."""
    gap_N = logprobs_N - reference_N
    match estimator:
        case "k1":
            return gap_N
        case "k2":
            return gap_N.square() / 2
        case "k3":
            return torch.expm1(-gap_N) + gap_N
