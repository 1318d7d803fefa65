"""Reference of losses, gradients and advantages: in numpy and float64, a token at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from areal_hpc.recipe.sections.objective import ObjectiveConfig

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tokens:
    """Some tokens of some rows, with everything that a loss may look at."""

    logprobs: Array
    proximal: Array
    behavior: Array
    advantages: Array
    rows: npt.NDArray[np.int64]
    episodes: npt.NDArray[np.int64]
    reference: Array | None = None


def make_tokens(seed: int, count: int = 40, rows: int = 6, spread: float = 0.5) -> Tokens:
    generator = np.random.default_rng(seed)
    row_of = np.sort(generator.integers(0, rows, count))
    logprobs = generator.normal(-2, 1, count)
    proximal = logprobs + generator.normal(0, spread, count)
    behavior = proximal + generator.normal(0, spread, count)
    advantages = generator.normal(0, 1, rows)[row_of]
    reference = logprobs + generator.normal(0, spread, count)
    return Tokens(logprobs, proximal, behavior, advantages, row_of, row_of // 2, reference)


def aggregate(tokens: Tokens, objective: ObjectiveConfig) -> Array:
    """Compute the weight of each term in the loss of the batch."""
    n = len(set(tokens.episodes.tolist()))
    weights = np.empty(len(tokens.rows))
    for index, episode in enumerate(tokens.episodes):
        length = int((tokens.episodes == episode).sum())
        weights[index] = {
            "token_mean": 1 / len(tokens.rows),
            "seq_mean_token_mean": 1 / (n * length),
            "seq_mean_token_sum": 1 / n,
            "seq_mean_token_sum_norm": 1 / (n * (objective.loss_scale_tokens or 1)),
        }[objective.loss_agg]
    return weights


def loss_and_gradient(
    tokens: Tokens, objective: ObjectiveConfig, weights: Array
) -> tuple[float, Array]:
    """The sum of weighted terms, and its derivative by each log-probability."""
    loss, gradient = 0.0, np.zeros(len(tokens.rows))
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    cap = objective.off_policy_correction_high
    for index, row in enumerate(tokens.rows):
        own = np.flatnonzero(tokens.rows == row)
        if objective.ratio_level == "sequence":
            shares = {int(other): 1 / len(own) for other in own}
        else:
            shares = {index: 1.0}
        logs = sum(share * (tokens.logprobs[i] - tokens.proximal[i]) for i, share in shares.items())
        ratio, advantage = float(np.exp(logs)), float(tokens.advantages[index])
        weight = weights[index]
        if objective.off_policy_correction == "clamp":
            weight = weight * min(
                float(np.exp(tokens.proximal[index] - tokens.behavior[index])), cap
            )
        if objective.kl.placement == "loss" and tokens.reference is not None:
            gap = float(tokens.logprobs[index] - tokens.reference[index])
            value, slope = {
                "k1": (gap, 1.0),
                "k2": (gap**2 / 2, gap),
                "k3": (float(np.exp(-gap)) - 1 + gap, 1 - float(np.exp(-gap))),
            }[objective.kl.estimator]
            loss += weight * objective.kl.coef * value
            gradient[index] += weight * objective.kl.coef * slope
        if objective.surrogate == "none":
            loss -= weight * advantage * tokens.logprobs[index]
            gradient[index] -= weight * advantage
        elif objective.surrogate == "cispo":
            bounded = min(max(ratio, low), high)
            loss -= weight * bounded * advantage * tokens.logprobs[index]
            gradient[index] -= weight * bounded * advantage
        elif objective.surrogate == "dppo":
            moved = float(np.exp(tokens.logprobs[index]) - np.exp(tokens.proximal[index]))
            if -objective.clip_low <= moved if advantage < 0 else moved <= objective.clip_high:
                loss -= weight * ratio * advantage
                gradient[index] -= weight * ratio * advantage
        else:
            free, bound = ratio * advantage, min(max(ratio, low), high) * advantage
            term, slope = (free, free) if free <= bound else (bound, 0.0)
            if objective.clip_dual is not None and advantage < 0:
                floor = objective.clip_dual * advantage
                term, slope = (floor, 0.0) if floor > term else (term, slope)
            loss -= weight * term
            for other, share in shares.items():
                gradient[other] -= weight * slope * share
    return loss, gradient


def sum_discounted_errors(
    turns: Sequence[tuple[Sequence[float], float]], discount: float, gae_lambda: float
) -> list[Array]:
    """Advantages at the tokens of each turn of a conversation, from its values and its reward.

    Each is written out as the sum of all later errors, where the product unrolls a recursion.
    """
    values = [value for own, _ in turns for value in own] + [0.0]
    rewards = [
        reward if index == len(own) - 1 else 0.0
        for own, reward in turns
        for index in range(len(own))
    ]
    errors = [
        reward + discount * values[index + 1] - values[index]
        for index, reward in enumerate(rewards)
    ]
    advantages = [
        math.fsum((discount * gae_lambda) ** (later - index) * errors[later]
                  for later in range(index, len(errors)))
        for index in range(len(errors))
    ]  # fmt: skip
    parts, first = [], 0
    for own, _ in turns:
        parts.append(np.array(advantages[first : first + len(own)]))
        first += len(own)
    return parts


def value_loss_and_gradient(
    values: Array, before: Array, returns: Array, clip_value: float | None
) -> tuple[float, Array]:
    """The mean of the terms, and its derivative by each value."""
    loss, gradient = 0.0, np.zeros(len(values))
    for index, (value, start, aim) in enumerate(zip(values, before, returns, strict=True)):
        term, slope = (value - aim) ** 2 / 2, value - aim
        if clip_value is not None:
            bounded = min(max(value, start - clip_value), start + clip_value)
            other = (bounded - aim) ** 2 / 2
            if other > term:
                term, slope = other, slope if bounded == value else 0.0
        loss += term / len(values)
        gradient[index] = slope / len(values)
    return loss, gradient
