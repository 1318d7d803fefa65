"""Behavior weights against a plain loop over tokens, and rows over ranks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.objective.importance_sampling import TokenRowMap, compute_importance_weights


def settings(correction: str, **bounds: float | str) -> dict[str, Any]:
    """Of an objective, without the prefix that all its keys of this kind have."""
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
    """What `compute_importance_weights` should say, token by token, in double precision."""
    logs = [p - b for p, b in zip(proximal, behavior, strict=True)]
    kls = [math.exp(x) - 1 - x for x in logs]

    def over(values: list[float], own: int, agg: str = "mean") -> float:
        found = np.array([v for v, other in zip(values, row, strict=True) if other == own])
        return float({"mean": found.mean(), "sum": found.sum(), "max": found.max()}[agg])

    kind, metric = config.off_policy_correction, config.off_policy_correction_metric
    measured = {"ratio": logs, "kl": kls, "k1": logs, "k2": [x * x / 2 for x in logs]}[metric]
    low, high = config.off_policy_correction_low, config.off_policy_correction_high
    by_row = config.off_policy_correction_level == "sequence" and kind != "none"
    found: dict[str, list[float]] = {"weight": [], "raw": [], "outside": [], "kl": kls}
    for log, value, own in zip(logs, measured, row, strict=True):
        raw = math.exp(over(logs, own) if by_row and metric == "ratio" else log)
        judged = over(measured, own, config.off_policy_correction_agg) if by_row else value
        judged = math.exp(judged) if metric == "ratio" else judged
        outside = kind != "none" and not (judged <= high and (low == 0 or low <= judged))
        clamped = min(max(raw, low), high) if outside else raw
        weight = {"none": 1.0, "mask": 0.0 if outside else raw, "clamp": clamped}[kind]
        for name, value in (("weight", weight), ("raw", raw), ("outside", outside)):
            found[name].append(value)
    return found


@pytest.mark.parametrize("chosen", SETTINGS, ids=lambda one: "-".join(map(str, one.values())))
@given(TOKENS)
def test_matches_loop(chosen: dict[str, Any], tokens: list[tuple[float, float, int]]) -> None:
    config = ObjectiveConfig(**chosen)
    proximal, behavior, row = ([token[i] for token in tokens] for i in range(3))
    expected = slowly(proximal, behavior, row, config)  # type: ignore[arg-type]
    rows = TokenRowMap(torch.tensor(row, dtype=torch.long), 4)
    both = torch.tensor([proximal, behavior], dtype=torch.float64)
    found = compute_importance_weights(both[0], both[1], rows, config)
    np.testing.assert_allclose(found.weight_N, expected["weight"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.raw_N, expected["raw"], rtol=1e-9)
    np.testing.assert_allclose(found.kl_N, expected["kl"], rtol=1e-6, atol=1e-12)
    assert found.outside_N.tolist() == expected["outside"]


@pytest.mark.parametrize("chosen", SETTINGS[1:])
def test_what_is_not_a_number_is_not_masked_away(chosen: dict[str, Any]) -> None:
    rows = TokenRowMap(torch.tensor([0, 1]), 2)
    behavior = torch.tensor([float("nan"), -1.0])
    found = compute_importance_weights(
        torch.tensor([-1.0, -1.0]), behavior, rows, ObjectiveConfig(**chosen)
    )
    assert found.weight_N[0].isnan()
    assert found.weight_N[1] == 1.0


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
