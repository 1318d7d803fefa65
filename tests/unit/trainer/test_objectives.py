"""Surrogates and aggregations equal float64 references, and mini-batches the whole batch."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.objective.loss_stats import (
    estimate_abs_diff_percentile,
    measure_engine_mismatch,
)
from areal_hpc.trainer.objective.policy_loss import (
    compute_loss_aggregation_row_factors,
    compute_minibatch_factors,
    compute_policy_loss,
    interpolate_logprobs,
)
from areal_hpc.trainer.objective.token_rows import TokenRowMap
from tests.support.loss_reference import Tokens, aggregate, loss_and_gradient, make_tokens

AGGREGATIONS: list[dict[str, Any]] = [
    {"loss_agg": "token_mean"},
    {"loss_agg": "seq_mean_token_mean"},
    {"loss_agg": "seq_mean_token_sum"},
    {"loss_agg": "seq_mean_token_sum_norm", "loss_scale_tokens": 7},
]
SURROGATES: list[dict[str, Any]] = [
    {"surrogate": "clip"},
    {"surrogate": "clip", "clip_low": 0.01, "clip_high": 0.02},
    {"surrogate": "clip", "clip_dual": 1.3},
    {"surrogate": "clip", "ratio_level": "sequence", "clip_low": 0.1, "clip_high": 0.1},
    {"surrogate": "clip", "ratio_level": "sequence", "clip_dual": 1.1},
    {"surrogate": "cispo"},
    {"surrogate": "cispo", "clip_low": 1.0},
    {"surrogate": "cispo", "ratio_level": "sequence"},
    {"surrogate": "dppo", "clip_low": 0.01, "clip_high": 0.02},
    {"surrogate": "none"},
    {"kl": {"coef": 0.3, "placement": "loss", "estimator": "k2"}},
    {"kl": {"coef": 0.3, "placement": "loss", "estimator": "k3"}},
]
CORRECTIONS: list[dict[str, Any]] = [
    {"off_policy_correction": "none"},
    {"off_policy_correction": "clamp", "off_policy_correction_high": 1.5},
]


def compute(
    tokens: Tokens, objective: ObjectiveConfig, dtype: torch.dtype = torch.float64, parts: int = 1
) -> tuple[float, np.ndarray[Any, Any], int]:
    """Compute the loss as the trainer does, over mini-batches of rows at frozen weights."""
    logprobs = torch.tensor(tokens.logprobs, dtype=dtype, requires_grad=True)
    rows = list(range(int(tokens.rows.max()) + 1))
    lengths = [int((tokens.rows == row).sum()) for row in rows]
    episodes = [row // 2 for row in rows]
    scales = compute_loss_aggregation_row_factors(lengths, episodes, objective)
    dealt = [rows[hand::parts] for hand in range(parts)]
    factors = compute_minibatch_factors([sum(lengths[row] for row in part) for part in dealt])
    loss, clipped = torch.zeros((), dtype=dtype), 0
    for part, factor in zip(dealt, factors, strict=True):
        indices = np.flatnonzero(np.isin(tokens.rows, part))
        proximal, behavior, advantages = (
            torch.tensor(values[indices], dtype=dtype)
            for values in (tokens.proximal, tokens.behavior, tokens.advantages)
        )
        row_map = TokenRowMap(torch.tensor(tokens.rows[indices]), len(rows))
        scale = None if scales is None else torch.tensor(scales, dtype=dtype)[tokens.rows[indices]]
        reference = None
        if objective.kl.coef and tokens.reference is not None:
            reference = torch.tensor(tokens.reference[indices], dtype=dtype)
        part_loss = compute_policy_loss(
            *(logprobs[indices], proximal, behavior, advantages),
            *(row_map, objective, scale),
            reference_N=reference,
        )
        loss = loss + part_loss.total * factor / len(indices) / parts
        clipped += int(part_loss.sums["clipped"])
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.double().numpy(), clipped


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda one: one["loss_agg"])
@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda one: "-".join(map(str, one.values())))
def test_loss_and_gradient_equal_the_reference(
    surrogate: dict[str, Any], aggregation: dict[str, Any]
) -> None:
    acted = 0
    for seed, correction in itertools.product(range(6), CORRECTIONS):
        objective = ObjectiveConfig(**surrogate, **aggregation, **correction)
        tokens = make_tokens(seed)
        expected, slopes = loss_and_gradient(tokens, objective, aggregate(tokens, objective))
        loss, gradient, clipped = compute(tokens, objective)
        assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert np.abs(gradient - slopes).max() <= 1e-12 * max(1.0, np.abs(slopes).max())
        loss, gradient, _ = compute(tokens, objective, torch.float32)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert np.abs(gradient - slopes).max() <= 1e-6 * max(1.0, np.abs(slopes).max())
        acted += clipped
    assert (acted > 0) is (surrogate.get("surrogate") != "none")


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda one: one["loss_agg"])
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_minibatch_gradients_have_the_full_mean(aggregation: dict[str, Any], parts: int) -> None:
    """Each part was divided by its own tokens before: a token weighed up to twice another."""
    for surrogate in SURROGATES:
        objective = ObjectiveConfig(**surrogate, **aggregation)
        tokens = make_tokens(9, count=60, rows=10)
        whole_loss, expected, _ = compute(tokens, objective)
        loss, gradient, _ = compute(tokens, objective, parts=parts)
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-14)


def test_the_dual_clip_bounds_what_a_bad_token_can_do() -> None:
    """A ratio of e^12 made a gradient of 162,755."""
    objective = ObjectiveConfig(off_policy_correction="none", clip_dual=3.0)
    tokens = Tokens(*(np.array([value]) for value in (-1.0, -13.0, -13.0, -1.0, 0, 0)))
    loss, gradient, clipped = compute(tokens, objective)
    assert (loss, gradient.tolist(), clipped) == (3.0, [0.0], 1)
    _, gradient, _ = compute(tokens, ObjectiveConfig(off_policy_correction="none"))
    assert gradient[0] == pytest.approx(162_755, rel=1e-5)


VALUE = {"baseline": "value", "critic": {"model": "initial"}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"turn_discount": 0.5}, "credit=turn"),
        ({"scale_rewards": "none", "std_ddof": 0}, "std_ddof"),
        ({"clip_dual": 1.0}, "greater than 1"),
        ({"clip_dual": 3.0, "surrogate": "cispo"}, "surrogate=clip"),
        ({"ratio_level": "sequence", "surrogate": "none"}, "ratio_level=token"),
        ({"ratio_level": "sequence", "surrogate": "dppo"}, "ratio_level=token"),
        ({"scale_rewards": "group_mean", "std_ddof": 0}, "std_ddof"),
        (VALUE | {"scale_rewards": "group_mean"}, "set scale_rewards=batch"),
        ({"loss_agg": "seq_mean_token_sum_norm"}, "loss_scale_tokens"),
        ({"loss_scale_tokens": 5}, "loss_agg=seq_mean_token_sum_norm"),
        ({"teacher": {"coef": 1.0}}, "belong together"),
        ({"teacher": {"path": "/model"}}, "belong together"),
        ({"teacher": {"url": "http://node7:30000"}}, "set path or url with coef"),
        ({"teacher": {"coef": 1.0, "path": "/m", "url": "http://node7:1"}}, "both name a teacher"),
        ({"teacher": {"coef": 1.0, "path": "/m", "api_key_file": "/k"}}, "no server is called"),
        ({"teacher": {"coef": 1.0, "url": "http://me:secret@node7"}}, "should match pattern"),
        ({"teacher": {"coef": 1.0, "url": "http://node7:30000/v1"}}, "should match pattern"),
        ({"kl": {"reference": "/model"}}, "set coef"),
        ({"kl": {"coef": 0.1, "estimator": "k2"}}, "set estimator=k1"),
        ({"kl": {"coef": 0.1, "estimator": "k3"}}, "set estimator=k1"),
        ({"kl": {"coef": 0.1, "placement": "loss"}}, "expected gradient of 0: set estimator=k2"),
        ({"baseline": "value"}, "set critic.model=initial"),
        ({"critic": {"model": "initial"}}, "critic.model=initial: set baseline=value"),
        ({"critic": {"lr": 1e-3}}, "critic.model=None: set baseline=value"),
        ({"gae_lambda": 0.9}, "gae_lambda=0.9"),
        ({"discount": 0.9, "gae_unit": "turn"}, "discount=0.9 and gae_unit=turn"),
        (VALUE | {"credit": "turn", "turn_discount": 0.5}, "set discount, with gae_unit=turn"),
        (VALUE | {"std_ddof": 0}, "leave it out"),
    ],
)
def test_keys_without_a_meaning_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ObjectiveConfig.model_validate(values)


CONFIG = ObjectiveConfig(
    clip_low=0.2, clip_high=0.28, off_policy_correction="clamp", off_policy_correction_high=5.0
)


def rows(tokens: int) -> TokenRowMap:
    """Map all tokens to one row."""
    return TokenRowMap(torch.zeros(tokens, dtype=torch.long), 1)


def test_no_tokens_give_a_loss_of_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss = compute_policy_loss(empty, empty, empty, empty, rows(0), CONFIG)
    assert {float(value) for value in loss.sums.values()} == {0.0}
    assert loss.largest_weight == 0.0


def test_the_log_linear_estimate_is_exact_at_both_ends() -> None:
    held, behavior = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0])
    ages = torch.tensor([0.0, 1.0, 3.0])
    assert interpolate_logprobs(held, behavior, ages, 0.0) is held
    # Half a step on: a fresh token's proximal policy is the one that sampled it; the others' are
    # 1 / 1.5 and 3 / 3.5 of the way.
    logprobs = interpolate_logprobs(held, behavior, ages, 0.5)
    np.testing.assert_allclose(logprobs, [-3.0, -3 + 2 / 1.5, -3 + 2 * 3 / 3.5], rtol=1e-6)


def test_with_a_whole_step_taken_the_estimate_is_areals() -> None:
    """`areal/trainer/ppo/actor.py`: alpha = (v - 1 - v_behave) / (v - v_behave)."""
    held, behavior = torch.tensor([-1.5, -2.2]), torch.tensor([-1.0, -2.0])
    # Sampled by 0 and 2, trained as version 4: the proximal one is 3, of ages 3 and 1.
    logprobs = interpolate_logprobs(held, behavior, torch.tensor([3.0, 1.0]), 1.0)
    np.testing.assert_allclose(logprobs, [-1.375, -2.1], rtol=1e-6)


def test_mean_maximum_and_k3_are_those_of_the_tokens_that_are_compared() -> None:
    trainer, engine = torch.tensor([-1.0, -2.0, -5.0]), torch.tensor([-1.5, -2.0, 0.0])
    mismatch = measure_engine_mismatch(trainer, engine, torch.tensor([True, True, False]))
    assert mismatch.sums["compared"] == 2
    assert mismatch.sums["mismatch_abs"] == pytest.approx(0.5)
    assert mismatch.sums["mismatch_kl"] == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert mismatch.maxima["mismatch"] == 0.5
    assert int(mismatch.histograms["mismatch"].sum()) == 2


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.5, 40.0])
def test_a_percentile_is_within_four_percent_also_when_parts_are_added_up(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    diffs = torch.rand(10_000, generator=generator, dtype=torch.float64) * scale
    everyone = torch.ones(5000, dtype=torch.bool)
    parts = [measure_engine_mismatch(part, 0 * part, everyone) for part in diffs.split(5000)]
    histogram = parts[0].histograms["mismatch"] + parts[1].histograms["mismatch"]
    largest = max(float(part.maxima["mismatch"]) for part in parts)
    expected = float(torch.quantile(diffs, 0.99))
    assert estimate_abs_diff_percentile(histogram, 0.99, largest) == pytest.approx(
        expected, rel=0.04
    )


def test_no_tokens_equal_tokens_and_numbers_that_are_none_are_no_trouble() -> None:
    none = measure_engine_mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert float(none.sums["compared"]) == 0.0
    assert estimate_abs_diff_percentile(none.histograms["mismatch"], 0.99, 0.0) == 0.0
    equal = measure_engine_mismatch(torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert (
        estimate_abs_diff_percentile(
            equal.histograms["mismatch"], 0.99, float(equal.maxima["mismatch"])
        )
        == 0.0
    )
    odd = torch.tensor([math.nan, -math.inf])
    mismatch = measure_engine_mismatch(odd, torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert math.isnan(mismatch.sums["mismatch_abs"])
    assert int(mismatch.histograms["mismatch"].sum()) == 2
