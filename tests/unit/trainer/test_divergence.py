"""The penalty for leaving a reference: which estimator, where, follows the true gradient."""

import itertools
from typing import Any

import numpy as np
import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.batch.training_rows import (
    BatchScores,
    build_rows,
)
from areal_hpc.trainer.objective.reply_credit import compute_reply_earnings
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.bias import (
    AGENTS,
    CONTEXTS,
    SCENARIOS,
    VOCAB,
    ToyTask,
    compute_expected_gradient,
    list_linear_episodes,
    make_policy,
    make_task,
    measure,
    measure_cosine,
    softmax,
    stay_near,
)
from tests.support.sample_episodes import MadeUpTurn, build_batch
from tests.support.thoroughness import choose

COEF = 0.5
EXACT: dict[str, Any] = {
    "scale_rewards": "none", "surrogate": "none", "loss_agg": "seq_mean_token_sum",
}  # fmt: skip


def make_penalized_task(kind: str, sigma: float, seed: int = 1) -> ToyTask:
    policy = make_policy(seed)
    noise = np.random.default_rng(seed + 5000).normal(0, sigma, (CONTEXTS, VOCAB))
    task = make_task(list_linear_episodes(seed, kind), policy)
    return stay_near(task, softmax(np.log(policy) + noise), COEF)


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
    found = compute_expected_gradient(task, objective)
    assert measure_cosine(found, task.truth) >= 1 - 1e-9
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(task.truth), rel=1e-6)
    unpenalized = make_task(task.episodes, task.policy).truth
    assert measure_cosine(found, unpenalized) < 0.95, "the penalty matters"


@pytest.mark.parametrize(("estimator", "near", "far"), [("k2", 0.999, 0.96), ("k3", 0.999, 0.90)])
def test_the_loss_misses_what_a_token_does_to_those_after_it(
    estimator: str, near: float, far: float
) -> None:
    """As measured, k2 .9998 to .976 and k3 .9994 to .948 for noise of .1 to 1 on all logits."""
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
    for place, (one, other) in enumerate(zip(built, without, strict=True)):
        expected = other.channels["advantage"] + 0.5 * (teacher[place] - start[place])
        np.testing.assert_allclose(one.channels["advantage"], expected, rtol=1e-6)
    assert objective.advantages_need_logprobs


BRANCHES = list(SCENARIOS)[4]


def test_credit_of_turns_is_exact_on_branches() -> None:
    assert measure(BRANCHES, "rloo, credit=turn", 2)[0] >= 1 - 1e-9


@pytest.mark.parametrize("agent", choose(AGENTS, "a sub-agent as a tool"))
@pytest.mark.parametrize("objective", ["rloo", "rloo, credit=turn"])
def test_the_reward_of_an_episode_is_exact_whatever_its_conversations(
    agent: str, objective: str
) -> None:
    assert measure(f"{agent}, a reward of the episode", objective, 1)[0] >= 1 - 1e-9


def test_a_known_bias_is_seen() -> None:
    assert measure("graded rewards (lognormal)", "default", 1)[0] < 0.95
