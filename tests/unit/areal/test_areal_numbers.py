"""Losses of a translated AReaL configuration equal AReaL's own numbers.

The reference repeats the formulas of AReaL's actor row by row.
"""

from typing import Any

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.areal.translation import translate_to_recipe
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss
from areal_hpc.trainer.objective.token_rows import TokenRowMap
from tests.support.loss_reference import Tokens, make_tokens

N_SAMPLES = 4
SEEDS = range(8)


def translate_objective(actor: dict[str, Any], **sections: Any) -> ObjectiveConfig:
    tree = {"actor": actor, "gconfig": {"n_samples": N_SAMPLES}, **sections}
    translation = translate_to_recipe(tree)
    assert not [item.key for item in translation.untranslated if item.key.startswith("actor")]
    return ObjectiveConfig.model_validate(translation.recipe["trainer"]["objective"])


def judge_row(log_ratio: torch.Tensor, rejection: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Return AReaL's metric of each token or of the row, and each token's behavior weight."""
    metric = {
        "ratio": log_ratio, "kl_k1": log_ratio, "kl_k2": log_ratio**2 / 2,
    }[rejection["metric"]]  # fmt: skip
    weight = log_ratio.exp()
    if rejection["level"] == "sequence":
        aggregates = {"mean": metric.mean(), "sum": metric.sum(), "max": metric.max()}
        metric = aggregates[rejection.get("agg", "mean")].expand_as(log_ratio)
        if rejection["metric"] == "ratio":
            weight = log_ratio.mean().exp().expand_as(log_ratio)
    return (metric.exp() if rejection["metric"] == "ratio" else metric), weight


def compute_areal_loss(
    tokens: Tokens, actor: dict[str, Any]
) -> tuple[float, np.ndarray[Any, Any], int]:
    """Compute AReaL's actor loss: value, gradient, and number of tokens rejected or clamped."""
    logprobs = torch.tensor(tokens.logprobs, requires_grad=True)
    rejection, changed = actor.get("rejection_sampling"), 0
    low, high = 1 - actor["eps_clip"], 1 + actor.get("eps_clip_higher", actor["eps_clip"])
    total = logprobs.new_zeros(())
    for row in sorted(set(tokens.rows.tolist())):
        indices = torch.from_numpy(np.flatnonzero(tokens.rows == row))
        proximal, behavior, advantages = (
            torch.tensor(values)[indices]
            for values in (tokens.proximal, tokens.behavior, tokens.advantages)
        )
        log_ratio = logprobs[indices] - proximal
        if actor.get("importance_sampling_level") == "sequence":
            log_ratio = log_ratio.mean().expand_as(log_ratio)
            advantages = advantages.mean().expand_as(advantages)
        ratio = log_ratio.exp()
        loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(low, high))
        if "c_clip" in actor:
            loss = torch.min(loss, advantages.sign() * actor["c_clip"] * advantages)
        if rejection is not None:
            metric, weight = judge_row(proximal - behavior, rejection)
            lower = rejection.get("lower")
            outside = metric > rejection["upper"]
            if lower is not None:
                outside = outside | (metric < lower)
            if rejection["action"] == "mask":
                weight = torch.where(outside, 0.0, weight)
            else:
                clamped = weight.clamp(0.0 if lower is None else lower, rejection["upper"])
                weight = torch.where(outside, clamped, weight)
            changed += int(outside.sum())
            loss = loss * weight
        total = total + loss.sum()
    total = total / len(tokens.rows)
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad.numpy(), changed


REJECTIONS: list[dict[str, Any]] = [
    {"action": action, "level": level, "metric": metric, "upper": upper, **more}
    for action, level, metric, upper, more in (
        ("mask", "token", "ratio", 2.0, {"lower": 0.5}),
        ("clamp", "token", "ratio", 1.5, {}),
        ("mask", "token", "kl_k1", 0.4, {"lower": -0.4}),
        ("mask", "token", "kl_k2", 0.1, {}),
        ("mask", "sequence", "ratio", 1.1, {"lower": 0.9}),
        ("mask", "sequence", "ratio", 2.0, {"agg": "max"}),
        ("clamp", "sequence", "ratio", 1.2, {"agg": "sum", "lower": 0.5}),
        ("mask", "sequence", "kl_k1", 0.8, {"agg": "sum"}),
        ("mask", "sequence", "kl_k1", 0.7, {"agg": "max"}),
        ("mask", "sequence", "kl_k2", 0.8, {"agg": "sum"}),
        ("mask", "sequence", "kl_k2", 0.5, {"agg": "max"}),
    )
]
RATIOS: list[dict[str, Any]] = [
    {"eps_clip": 0.2, "eps_clip_higher": 0.28},
    {"eps_clip": 0.2, "c_clip": 1.3},
    {"eps_clip": 0.1, "importance_sampling_level": "sequence"},
]


LOSSES = [
    pytest.param(ratios, rejection, id="-".join(map(str, [*ratios.values(), *rejection.values()])))
    for ratios in RATIOS
    for rejection in REJECTIONS
    # AReaL takes a row's ratio over the tokens that are left; here over all, as in the paper.
    if "importance_sampling_level" not in ratios
    or (rejection["action"], rejection["level"]) != ("mask", "token")
]


@pytest.mark.parametrize(("ratios", "rejection"), LOSSES)
def test_loss_and_gradient_are_areals(ratios: dict[str, Any], rejection: dict[str, Any]) -> None:
    actor = {**ratios, "use_decoupled_loss": True, "rejection_sampling": rejection}
    objective = translate_objective({**actor, "ppo_n_minibatches": 4})
    acted = 0
    for seed in SEEDS:
        tokens = make_tokens(seed)
        expected, slopes, changed = compute_areal_loss(tokens, actor)
        logprobs = torch.tensor(tokens.logprobs, requires_grad=True)
        proximal, behavior, advantages = (
            torch.tensor(values) for values in (tokens.proximal, tokens.behavior, tokens.advantages)
        )
        rows = TokenRowMap(torch.tensor(tokens.rows), int(tokens.rows.max()) + 1)
        loss = compute_policy_loss(logprobs, proximal, behavior, advantages, rows, objective)
        total = loss.total
        (total / len(tokens.rows)).backward()
        assert logprobs.grad is not None
        assert total.item() / len(tokens.rows) == pytest.approx(expected, rel=1e-12, abs=1e-14)
        np.testing.assert_allclose(logprobs.grad.numpy(), slopes, rtol=1e-10, atol=1e-14)
        assert int(loss.sums["outside"]) == changed
        acted += changed
    assert 0 < acted < len(SEEDS) * 40
