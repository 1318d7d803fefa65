"""Cases for TRL and verl, and for `trainer.objective` beside them. Numpy only.

Two interpreters read this: that of the tests, and that of .venvs/oracles, which has TRL and verl.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
SEEDS = range(100)
GROUPS, SAMPLES, TOKENS = 4, 5, 12
LOW, HIGH, DUAL, KL_COEF, CAP = 0.2, 0.28, 3.0, 0.3, 1.5
DISCOUNT, LAMBDA = 0.97, 0.9
CLIP_VALUE = 0.2


@dataclass(frozen=True)
class OracleBatch:
    """Random episodes of one row each [B, T], padded at the end, with tools' tokens in between."""

    mask: Array
    """1 where a token is trained."""
    logprobs: Array
    proximal: Array
    behavior: Array
    reference: Array
    advantages: Array
    """One an episode [B]."""
    rewards: Array
    """One an episode [B]."""
    groups: npt.NDArray[np.int64]
    """Task of each episode [B]."""
    values: Array
    returns: Array


def make_oracle_batch(seed: int) -> OracleBatch:
    """The batch of a seed: episodes of 1 to TOKENS tokens, ratios far beyond the clip's bounds."""
    generator = np.random.default_rng(seed)
    shape = (GROUPS * SAMPLES, TOKENS)
    lengths = generator.integers(1, TOKENS + 1, shape[0])
    mask = (np.arange(TOKENS) < lengths[:, None]) & (generator.random(shape) < 0.8)
    mask[:, 0] = True
    logprobs = generator.normal(-2, 1, shape)
    proximal = logprobs + generator.normal(0, 0.5, shape)
    return OracleBatch(
        mask=mask.astype(np.float64),
        logprobs=logprobs,
        proximal=proximal,
        behavior=proximal + generator.normal(0, 0.5, shape),
        reference=logprobs + generator.normal(0, 0.5, shape),
        advantages=generator.normal(0, 1, shape[0]),
        rewards=generator.normal(0, 1, shape[0]),
        groups=np.repeat(np.arange(GROUPS), SAMPLES),
        values=generator.normal(0, 1, shape),
        returns=generator.normal(0, 1, shape),
    )


@dataclass(frozen=True)
class LossCase:
    name: str
    library: Literal["TRL", "verl"]
    theirs: Mapping[str, Any]
    """Settings of the trainer (TRL) or the actor (verl), in the library's words."""
    ours: Mapping[str, Any]
    """Keys of `trainer.objective`."""
    difference: str = "none"
    correction: str = ""
    """verl's `rollout_is_threshold`, if tokens are weighed by pi_proximal / pi_behavior."""


AGGREGATIONS: Mapping[str, Mapping[str, Any]] = {
    "token-mean": {"loss_agg": "token_mean"},
    "seq-mean-token-mean": {"loss_agg": "seq_mean_token_mean"},
    "seq-mean-token-sum": {"loss_agg": "seq_mean_token_sum"},
    "seq-mean-token-sum-norm": {
        "loss_agg": "seq_mean_token_sum_norm",
        "loss_scale_tokens": TOKENS,
    },
}
"""verl's `loss_agg_mode` -> keys of `trainer.objective`."""
_NORM = AGGREGATIONS["seq-mean-token-sum-norm"]
_K3 = {"coef": KL_COEF, "placement": "loss", "estimator": "k3"}
_CISPO_BOUND = "TRL's `epsilon_high` is the bound itself: 1 + `clip_high`; it has no lower one"
_EPSILON = "verl adds 1e-8 to the tokens of an episode"
_SAPO = "examples.objectives.sapo:compute_terms"

LOSS_CASES = (
    LossCase("GRPO", "TRL", {"loss_type": "grpo"}, {"loss_agg": "seq_mean_token_mean"}),
    LossCase("DAPO", "TRL", {"loss_type": "dapo"}, {}),
    LossCase("BNPO", "TRL", {"loss_type": "bnpo"}, {}),
    LossCase(
        "Dr. GRPO",
        "TRL",
        {"loss_type": "dr_grpo"},
        _NORM,
        "`max_completion_length` is `loss_scale_tokens`",
    ),
    LossCase(
        "LUSPO, sums",
        "TRL",
        {"loss_type": "luspo", "importance_sampling_level": "token"},
        {"loss_agg": "seq_mean_token_sum"},
    ),
    LossCase(
        "dual clip",
        "TRL",
        {"loss_type": "grpo", "delta": DUAL},
        {"loss_agg": "seq_mean_token_mean", "clip_dual": DUAL},
    ),
    LossCase(
        "GSPO",
        "TRL",
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_agg": "seq_mean_token_mean", "ratio_level": "sequence"},
    ),
    LossCase(
        "CISPO",
        "TRL",
        {"loss_type": "cispo", "epsilon_high": 1 + HIGH},
        {"surrogate": "cispo", "clip_low": 1.0},
        _CISPO_BOUND,
    ),
    LossCase("KL k3 in the loss", "TRL", {"loss_type": "dapo", "beta": KL_COEF}, {"kl": _K3}),
    LossCase(
        "SAPO",
        "TRL",
        {"loss_type": "sapo"},
        {"loss_agg": "seq_mean_token_mean", "custom": _SAPO},
        "TRL has the temperatures in float32",
    ),
    *(
        LossCase(
            "PPO, dual clip",
            "verl",
            {"loss_mode": "vanilla", "loss_agg_mode": mode},
            {**keys, "clip_dual": DUAL},
            "verl always has the dual clip; `clip_dual` is off by default"
            + (f"; {_EPSILON}" if mode == "seq-mean-token-mean" else ""),
        )
        for mode, keys in AGGREGATIONS.items()
    ),
    LossCase(
        "GSPO",
        "verl",
        {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
        {"loss_agg": "seq_mean_token_mean", "ratio_level": "sequence"},
        _EPSILON,
    ),
    LossCase(
        "CISPO",
        "verl",
        {"loss_mode": "cispo", "loss_agg_mode": "token-mean"},
        {"surrogate": "cispo"},
    ),
    LossCase(
        "REINFORCE",
        "verl",
        {"loss_mode": "gpg", "loss_agg_mode": "seq-mean-token-sum"},
        {"surrogate": "none", "loss_agg": "seq_mean_token_sum"},
    ),
    LossCase(
        "SAPO",
        "verl",
        {"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
        {"loss_agg": "seq_mean_token_mean", "custom": _SAPO},
        _EPSILON,
    ),
    LossCase(
        "TIS",
        "verl",
        {"loss_mode": "vanilla", "loss_agg_mode": "token-mean"},
        {
            "clip_dual": DUAL,
            "off_policy_correction": "clamp",
            "off_policy_correction_high": CAP,
        },
        correction=str(CAP),
    ),
    LossCase(
        "IcePop",
        "verl",
        {"loss_mode": "vanilla", "loss_agg_mode": "token-mean"},
        {
            "clip_dual": DUAL,
            "off_policy_correction": "mask",
            "off_policy_correction_low": 0.5,
            "off_policy_correction_high": CAP,
        },
        correction=f"0.5_{CAP}",
    ),
)


@dataclass(frozen=True)
class AdvantageCase:
    name: str
    theirs: Mapping[str, Any]
    """verl's estimator by name, and arguments of it."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    difference: str = "none"


ADVANTAGE_CASES = (
    AdvantageCase(
        "GRPO",
        {"estimator": "grpo"},
        difference="verl divides by std + 1e-6 (TRL by std + 1e-4); here by std, and 0 below "
        "`min_reward_std`",
    ),
    AdvantageCase(
        "Dr. GRPO",
        {"estimator": "grpo", "norm_adv_by_std_in_grpo": False},
        {"scale_rewards": "none"},
    ),
    AdvantageCase(
        "RLOO", {"estimator": "rloo"}, {"baseline": "leave_one_out", "scale_rewards": "none"}
    ),
    AdvantageCase(
        "REINFORCE++",
        {"estimator": "reinforce_plus_plus"},
        {"baseline": "batch_mean", "scale_rewards": "batch"},
        "verl takes mean and deviation over tokens, so that long episodes weigh more; here over "
        "episodes. Compared where all have T tokens; there verl has B T - 1 degrees of freedom, "
        "here B - 1, and adds 1e-8 to the variance",
    ),
    AdvantageCase(
        "REINFORCE++ baseline",
        {"estimator": "reinforce_plus_plus_baseline"},
        {"scale_rewards": "batch"},
        "as REINFORCE++",
    ),
)
