"""The penalty for leaving a reference, and behavior weights against a plain loop over tokens."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.batch.training_rows import BatchScores, build_rows
from areal_hpc.trainer.objective.advantages import compute_reply_earnings
from areal_hpc.trainer.objective.policy_loss import compute_importance_weights
from areal_hpc.trainer.objective.token_rows import TokenRowMap
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.bias import SCENARIOS, compute_expected_gradient, measure, measure_cosine
from tests.support.sample_episodes import MadeUpTurn, build_batch
from tests.support.thoroughness import choose
from tests.support.toy_tasks import (
    AGENTS,
    CONTEXTS,
    VOCAB,
    ToyTask,
    list_linear_episodes,
    make_policy,
    make_task,
    softmax,
)

COEF = 0.5
EXACT: dict[str, Any] = {
    "scale_rewards": "none", "surrogate": "none", "loss_agg": "seq_mean_token_sum",
}  # fmt: skip


def make_penalized_task(kind: str, sigma: float, seed: int = 1) -> ToyTask:
    policy = make_policy(seed)
    noise = np.random.default_rng(seed + 5000).normal(0, sigma, (CONTEXTS, VOCAB))
    task = make_task(list_linear_episodes(seed, kind), policy)
    return replace(task, reference=softmax(np.log(policy) + noise), penalty=COEF)


@pytest.mark.parametrize(
    ("kind", "credit", "baseline"),
    choose(
        itertools.product(("graded", "turn"), ("episode", "turn"), ("leave_one_out", "none")),
        ("graded", "episode", "leave_one_out"),
        ("turn", "turn", "none"),
    ),
)
def test_k1_in_the_reward_is_exact(kind: str, credit: str, baseline: str) -> None:
    objective = ObjectiveConfig.model_validate(
        {"kl": {"coef": COEF}, "credit": credit, "baseline": baseline, **EXACT}
    )
    task = make_penalized_task(kind, 1.0)
    gradient = compute_expected_gradient(task, objective)
    assert measure_cosine(gradient, task.truth) >= 1 - 1e-9
    assert np.linalg.norm(gradient) == pytest.approx(np.linalg.norm(task.truth), rel=1e-6)
    unpenalized = make_task(task.episodes, task.policy).truth
    assert measure_cosine(gradient, unpenalized) < 0.95, "the penalty matters"


@pytest.mark.parametrize(("estimator", "near", "far"), [("k2", 0.999, 0.96), ("k3", 0.999, 0.90)])
def test_the_loss_misses_what_a_token_does_later(estimator: str, near: float, far: float) -> None:
    """Measured k2: .9998 to .976, and k3: .9994 to .948, for noise of .1 to 1 on all logits."""
    objective = ObjectiveConfig.model_validate({
        "kl": {"coef": COEF, "placement": "loss", "estimator": estimator},
        "baseline": "none", **EXACT,
    })  # fmt: skip
    for sigma, bound in ((0.1, near), (1.0, far)):
        task = make_penalized_task("turn", sigma, seed=2)
        plain = make_task(task.episodes, task.policy)
        penalty = compute_expected_gradient(task, objective) - compute_expected_gradient(
            plain, objective
        )
        cosine = measure_cosine(penalty, task.truth - plain.truth)
        assert bound <= cosine < 1 - 1e-6


def test_a_reply_loses_what_its_own_tokens_diverge_by() -> None:
    turns = [MadeUpTurn(9, 1.0, 2), MadeUpTurn(0, 2.0, 3)]
    rows = build_batch([[turns]], ExportSettings())
    (row,) = rows
    divergence_T = np.zeros(row.num_tokens, np.float32)
    divergence_T[row.loss_mask_T != 0] = [0.1, 0.2, 0.3, 0.4, 0.5]

    def earn(credit: str) -> list[float]:
        objective = ObjectiveConfig.model_validate({"credit": credit, "kl": {"coef": 2.0}})
        return [*map(float, compute_reply_earnings(rows, objective, [divergence_T]).earned_K)]

    assert earn("episode") == pytest.approx([3 - 2 * 1.5], abs=1e-6)
    second = 2 - 2 * 1.2
    assert earn("turn") == pytest.approx([1 - 2 * 0.3 + second, second], abs=1e-6)


def test_a_teacher_adds_to_the_advantage_of_each_token() -> None:
    rows = build_batch([[[MadeUpTurn(9, 1.0)], [MadeUpTurn(9, 0.0)]]], ExportSettings())
    generator = np.random.default_rng(4)
    start, teacher = (
        [(generator.normal(size=row.num_tokens) * row.loss_mask_T).astype(np.float32)
         for row in rows] for _ in range(2)
    )  # fmt: skip
    tree = {"teacher": {"path": "/teacher", "coef": 0.5}}
    objective, plain = ObjectiveConfig.model_validate(tree), ObjectiveConfig()
    forks = [GenerationFork(1, 0)]
    scores = BatchScores(start, None, teacher)
    built = build_rows(rows, WeightVersion(1, 0), forks, objective, scores)
    without = build_rows(rows, WeightVersion(1, 0), forks, plain)
    for index, (taught, other) in enumerate(zip(built, without, strict=True)):
        expected = other.channels["advantage"] + 0.5 * (teacher[index] - start[index])
        np.testing.assert_allclose(taught.channels["advantage"], expected, rtol=1e-6)
    assert objective.advantages_need_logprobs


BRANCHES = list(SCENARIOS)[4]


def test_credit_of_turns_is_exact_on_branches() -> None:
    assert measure(BRANCHES, "rloo, credit=turn", 2)[0] >= 1 - 1e-9


@pytest.mark.parametrize("agent", choose(AGENTS, "a sub-agent as a tool"))
@pytest.mark.parametrize("objective", ["rloo", "rloo, credit=turn"])
def test_the_reward_of_any_episode_is_exact(agent: str, objective: str) -> None:
    assert measure(f"{agent}, a reward of the episode", objective, 1)[0] >= 1 - 1e-9


def test_a_known_bias_is_seen() -> None:
    assert measure("graded rewards (lognormal)", "default", 1)[0] < 0.95


def settings(correction: str, **bounds: float | str) -> dict[str, Any]:
    """Return keys of an objective; those of bounds get their common prefix."""
    prefixed = {f"off_policy_correction_{name}": value for name, value in bounds.items()}
    return {"off_policy_correction": correction, **prefixed}


SETTINGS = [
    settings("none"),
    settings("clamp", high=2.0),
    settings("clamp", low=0.5, high=2.0),
    settings("clamp", level="sequence", high=1.1),
    settings("mask", low=0.5, high=5.0),
    settings("mask", level="sequence", low=0.9, high=1.1),
    settings("mask", metric="kl", high=0.1),
    settings("mask", metric="kl", level="sequence", high=0.2),
    settings("mask", metric="k1", high=0.3),
    settings("mask", metric="k1", low=-0.5, high=0.3),
    settings("mask", metric="k2", high=0.1),
    *(
        settings(kind, metric=metric, level="sequence", agg=agg, low=low, high=high)
        for agg in ("sum", "max")
        for kind, metric, low, high in (
            ("mask", "ratio", 0.5, 2.0),
            ("clamp", "ratio", 0.9, 1.1),
            ("mask", "kl", 0.0, 0.4),
            ("mask", "k1", -0.8, 0.8),
            ("mask", "k2", 0.0, 0.4),
        )
    ),
]

LOGPROB = st.floats(-4.0, -0.01)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.integers(0, 3)), max_size=12)
"""Proximal and behavior log-probability of each token, and its row."""


def slowly(
    proximal: list[float], behavior: list[float], row: list[int], config: ObjectiveConfig
) -> dict[str, list[float]]:
    """Compute importance weights token by token, in double precision."""
    logs = [p - b for p, b in zip(proximal, behavior, strict=True)]
    kls = [math.exp(x) - 1 - x for x in logs]

    def over(values: list[float], own: int, agg: str = "mean") -> float:
        selected = np.array([v for v, other in zip(values, row, strict=True) if other == own])
        return float({"mean": selected.mean(), "sum": selected.sum(), "max": selected.max()}[agg])

    kind, metric = config.off_policy_correction, config.off_policy_correction_metric
    measured = {"ratio": logs, "kl": kls, "k1": logs, "k2": [x * x / 2 for x in logs]}[metric]
    low, high = config.off_policy_correction_low, config.off_policy_correction_high
    by_row = config.off_policy_correction_level == "sequence" and kind != "none"
    results: dict[str, list[float]] = {"weight": [], "raw": [], "outside": [], "kl": kls}
    for log, value, own in zip(logs, measured, row, strict=True):
        raw = math.exp(over(logs, own) if by_row and metric == "ratio" else log)
        judged = over(measured, own, config.off_policy_correction_agg) if by_row else value
        judged = math.exp(judged) if metric == "ratio" else judged
        outside = kind != "none" and not (judged <= high and (low == 0 or low <= judged))
        clamped = min(max(raw, low), high) if outside else raw
        weight = {"none": 1.0, "mask": 0.0 if outside else raw, "clamp": clamped}[kind]
        for name, value in (("weight", weight), ("raw", raw), ("outside", outside)):
            results[name].append(value)
    return results


@pytest.mark.parametrize("chosen", SETTINGS, ids=lambda one: "-".join(map(str, one.values())))
@given(TOKENS)
def test_matches_loop(chosen: dict[str, Any], tokens: list[tuple[float, float, int]]) -> None:
    config = ObjectiveConfig(**chosen)
    proximal, behavior, row = ([token[i] for token in tokens] for i in range(3))
    expected = slowly(proximal, behavior, row, config)  # type: ignore[arg-type]
    rows = TokenRowMap(torch.tensor(row, dtype=torch.long), 4)
    both = torch.tensor([proximal, behavior], dtype=torch.float64)
    weights = compute_importance_weights(both[0], both[1], rows, config)
    np.testing.assert_allclose(weights.weight_N, expected["weight"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(weights.raw_N, expected["raw"], rtol=1e-9)
    np.testing.assert_allclose(weights.kl_N, expected["kl"], rtol=1e-6, atol=1e-12)
    assert weights.outside_N.tolist() == expected["outside"]


@pytest.mark.parametrize("chosen", SETTINGS[1:])
def test_what_is_not_a_number_is_not_masked_away(chosen: dict[str, Any]) -> None:
    rows = TokenRowMap(torch.tensor([0, 1]), 2)
    behavior = torch.tensor([float("nan"), -1.0])
    weights = compute_importance_weights(
        torch.tensor([-1.0, -1.0]), behavior, rows, ObjectiveConfig(**chosen)
    )
    assert weights.weight_N[0].isnan()
    assert weights.weight_N[1] == 1.0


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"proximal": "none"}, "set off_policy_correction=none"),
        (settings("clamp", metric="kl"), "use mask with kl"),
        (settings("mask", metric="kl", low=0.1), "bounded above only"),
        (settings("clamp", low=1.2), "must enclose 1"),
        (settings("clamp", high=0.9), "must enclose 1"),
        (settings("clamp", low=-0.1), "must enclose 1"),
        (settings("clamp", metric="k2"), "use mask with k2"),
        (settings("mask", metric="k2", low=0.1), "bounded above only"),
        (settings("mask", metric="k1", low=0.1), "use a negative one"),
        (settings("mask", agg="max"), "off_policy_correction_level=sequence"),
    ],
)
def test_contradicting_settings_are_refused(refused: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(**refused)
