"""Advantage estimation and the value loss once more: in float64, a token at a time."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def sum_discounted_errors(
    turns: Sequence[tuple[Sequence[float], float]], discount: float, gae_lambda: float
) -> list[Array]:
    """Advantages at the tokens of each turn of a conversation, from its values and its reward.

    Each is written out as the sum of all later errors, where the product unrolls a recursion.
    """
    values = [value for own, _ in turns for value in own] + [0.0]
    rewards = [
        reward if place == len(own) - 1 else 0.0
        for own, reward in turns
        for place in range(len(own))
    ]
    errors = [
        reward + discount * values[place + 1] - values[place]
        for place, reward in enumerate(rewards)
    ]
    advantages = [
        math.fsum((discount * gae_lambda) ** (later - place) * errors[later]
                  for later in range(place, len(errors)))
        for place in range(len(errors))
    ]  # fmt: skip
    found, first = [], 0
    for own, _ in turns:
        found.append(np.array(advantages[first : first + len(own)]))
        first += len(own)
    return found


def value_loss_and_gradient(
    values: Array, before: Array, returns: Array, clip_value: float | None
) -> tuple[float, Array]:
    """The mean of the terms, and its derivative by each value."""
    loss, gradient = 0.0, np.zeros(len(values))
    for place, (value, start, aim) in enumerate(zip(values, before, returns, strict=True)):
        term, slope = (value - aim) ** 2 / 2, value - aim
        if clip_value is not None:
            bounded = min(max(value, start - clip_value), start + clip_value)
            other = (bounded - aim) ** 2 / 2
            if other > term:
                term, slope = other, slope if bounded == value else 0.0
        loss += term / len(values)
        gradient[place] = slope / len(values)
    return loss, gradient
