"""Loss of a critic: squared errors of its values, clipped to those that a step began with."""

from collections.abc import Mapping

import torch

VALUE_SUM_NAMES = ("value_loss", "value_clipped", "tokens")
"""Sums over tokens: the loss, those at which the clip took the gradient away, their number."""


def compute_value_loss(
    values_N: torch.Tensor,
    before_N: torch.Tensor,
    returns_N: torch.Tensor,
    clip_value: float | None,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The sum of max((V - R)^2, (clip(V) - R)^2) / 2, clip(V) within `clip_value` of `before_N`.

    The pessimistic one of both, as a clipped surrogate is; None clips nothing. The gradient flows
    through `values_N`.

    Returns:
        The sum, to be divided by the number of tokens; `VALUE_SUM_NAMES` by name.
    """
    terms_N = (values_N - returns_N).square() / 2
    clipped_N = torch.zeros_like(values_N) != 0
    if clip_value is not None:
        bounded_N = before_N + (values_N - before_N).clamp(-clip_value, clip_value)
        bounded_terms_N = (bounded_N - returns_N).square() / 2
        clipped_N = (bounded_terms_N > terms_N) & ((values_N - before_N).abs() > clip_value)
        terms_N = torch.maximum(terms_N, bounded_terms_N)
    total = terms_N.sum()
    count = torch.full_like(total, len(values_N))
    measured = (total.detach(), clipped_N.sum(), count)
    return total, dict(zip(VALUE_SUM_NAMES, (one.double() for one in measured), strict=True))
