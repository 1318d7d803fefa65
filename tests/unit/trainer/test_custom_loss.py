"""Custom losses: values that a function may return, and shipped ones against float64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.objective.custom_loss import LossInputs, LossOutputs, load_custom_loss
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss
from areal_hpc.trainer.objective.token_rows import TokenRowMap
from examples.objectives import lite_ppo, m2po, sapo
from tests.support.loss_reference import Array, Tokens, make_tokens

HERE = "tests.unit.trainer.test_custom_loss"


def sapo_reference(tokens: Tokens) -> tuple[Array, Array, int]:
    """Compute terms, derivatives by the log-probabilities, and the number of bounded tokens."""
    terms, slopes = np.zeros(len(tokens.rows)), np.zeros(len(tokens.rows))
    for index, advantage in enumerate(tokens.advantages):
        ratio = math.exp(tokens.logprobs[index] - tokens.proximal[index])
        tau = 1.0 if advantage > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        terms[index] = 4 / tau * gate * advantage
        slopes[index] = 4 * gate * (1 - gate) * ratio * advantage
    return terms, slopes, 0


def m2po_reference(tokens: Tokens) -> tuple[Array, Array, int]:
    """Follow the paper's algorithm 1 row by row: drop the largest one after another."""
    logs = tokens.logprobs - tokens.behavior
    terms = np.exp(logs) * tokens.advantages
    gone = 0
    for row in set(tokens.rows.tolist()):
        further = (tokens.rows == row) & (logs * tokens.advantages > 0)
        stay = sorted(np.flatnonzero(further).tolist(), key=lambda index: abs(logs[index]))
        while stay and np.mean(logs[stay] ** 2) > 0.04:
            terms[stay.pop()] = 0.0
            gone += 1
    return terms, terms, gone


def lite_ppo_reference(tokens: Tokens) -> tuple[Array, Array, int]:
    terms, slopes, clipped = np.zeros(len(tokens.rows)), np.zeros(len(tokens.rows)), 0
    for index, advantage in enumerate(tokens.advantages):
        ratio = math.exp(tokens.logprobs[index] - tokens.proximal[index])
        bound = min(max(ratio, 0.8), 1.2) * advantage
        terms[index] = min(ratio * advantage, bound)
        slopes[index] = 0.0 if bound < ratio * advantage else ratio * advantage
        clipped += bound < ratio * advantage
    return terms, slopes, clipped


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("function", "reference", "acts"),
    [
        (sapo.compute_terms, sapo_reference, False),
        (m2po.compute_terms, m2po_reference, True),
        (lite_ppo.compute_terms, lite_ppo_reference, True),
    ],
    ids=["sapo", "m2po", "lite_ppo"],
)
def test_a_shipped_loss_equals_its_reference(
    function: Callable[[LossInputs], LossOutputs],
    reference: Callable[[Tokens], tuple[Array, Array, int]],
    acts: bool,
    dtype: torch.dtype,
) -> None:
    objective = ObjectiveConfig(custom="set.by:hand", off_policy_correction_high=1.5)
    close = 1e-12 if dtype == torch.float64 else 1e-6
    acted = []
    for seed in range(8):
        tokens = make_tokens(seed, spread=0.2)
        terms, slopes, bounded = reference(tokens)
        weights = np.minimum(np.exp(tokens.proximal - tokens.behavior), 1.5)
        logprobs = torch.tensor(tokens.logprobs, dtype=dtype, requires_grad=True)
        policy_loss = compute_policy_loss(
            logprobs,
            torch.tensor(tokens.proximal, dtype=dtype),
            torch.tensor(tokens.behavior, dtype=dtype),
            torch.tensor(tokens.advantages, dtype=dtype),
            TokenRowMap(torch.tensor(tokens.rows), 6),
            objective,
            custom=function,
        )
        loss = policy_loss.total
        loss.backward()
        assert logprobs.grad is not None
        gradient, expected = logprobs.grad.double().numpy(), -weights * slopes
        assert np.abs(gradient - expected).max() <= close * max(1.0, np.abs(expected).max())
        assert loss.item() == pytest.approx(
            -(weights * terms).sum(), rel=10 * close, abs=10 * close
        )
        assert int(policy_loss.sums["clipped"]) == bounded
        acted.append(bounded)
    assert bool(sum(acted)) == acts


def returns_a_number(inputs: LossInputs) -> Any:
    return inputs.logprobs_N.sum()


def returns_a_sum(inputs: LossInputs) -> LossOutputs:
    return LossOutputs((inputs.logprobs_N * inputs.advantages_N).sum())


def stops_the_gradient(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(inputs.logprobs_N.detach() * inputs.advantages_N)


def fails_without_tokens(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(inputs.logprobs_N - inputs.logprobs_N.max())


def is_infinite(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(inputs.logprobs_N / 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", "has no 'nothing'"),
        ("returns_a_number", "expected LossOutputs, got Tensor"),
        ("returns_a_sum", r"a tensor of shape \(0,\), got \(\)"),
        ("stops_the_gradient", "no gradient flows through terms_N"),
        ("fails_without_tokens", r"(?s)raised RuntimeError.*on 0 made-up tokens"),
        ("is_infinite", "expected finite terms"),
    ],
)
def test_a_function_that_is_no_loss_is_refused(name: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected) as caught:
        load_custom_loss(ObjectiveConfig(custom=f"{HERE}:{name}"))
    assert caught.value.problems[0].key == "trainer.objective.custom"
