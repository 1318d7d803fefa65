"""Policy gradients with a decoupled behavior weight (arXiv:2505.24298, equation 5).

The divergence from a reference policy is estimated at sampled tokens, d = log pi - log reference:

| estimator | of KL(pi || reference) | as a term of the loss |
|---|---|---|
| `k1` | d | its expected gradient is 0 |
| `k2` | d^2 / 2 | its gradient d * grad log pi is the divergence's in the mean |
| `k3` | exp(-d) - 1 + d | its expected gradient is that of KL(reference || pi) |

Names and definitions: joschu.net/blog/kl-approx. k3 in the loss is GRPO's (arXiv:2402.03300,
section 4.1.1).

Tokens may have been sampled by other weights than those at the start of an update.
The importance weight of a token is w = pi_proximal / pi_behavior. It corrects for this token alone,
not for the tokens that other weights would have sampled before and after it. So even unbounded it
is biased, and then its variance has no bound either. `trainer.objective.off_policy_correction` sets
the treatment of large and small weights: clamping them is called truncated importance sampling
(TIS, fengyao.notion.site/off-policy-rl), masking tokens outside two bounds IcePop
(arXiv:2510.18855, section 2.3.2), masking whole rows rejection.

The critic's loss is here too. docs/objectives-reference.md has the settings, and AReaL's names.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.objective.custom_loss import CustomLoss, LossInputs
from areal_hpc.trainer.objective.token_rows import TokenRowMap

LOSS_SUM_NAMES = (
    "loss", "clipped", "outside", "weight", "applied", "applied_squared", "kl", "reference",
)  # fmt: skip
"""Names of sums of a loss over tokens: `clipped` counts tokens whose gradient the clip removed
(with cispo: whose ratio it bounded), `outside` those whose behavior weight was out of bounds;
`weight` adds up behavior weights before the bounds, `applied` and `applied_squared` the factors of
the terms, `kl` the divergence of the proximal from the behavior policy, `reference` the values of
log pi - log reference."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Loss of some tokens [N]. All tensors stay on the device, for which nothing waits."""

    total: torch.Tensor
    """Sum over tokens, to be divided by the batch's sampled tokens."""
    sums: Mapping[str, torch.Tensor]
    """`LOSS_SUM_NAMES` by name."""
    largest_weight: torch.Tensor
    """Largest behavior weight before the bounds; 0 without tokens."""
    ratio_N: torch.Tensor
    """Ratio to the proximal policy; that of the row with `ratio_level=sequence`."""
    clipped_N: torch.Tensor
    """Tokens at which the clip acted."""
    outside_N: torch.Tensor
    """Tokens whose behavior weight was out of bounds."""


def compute_policy_loss(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    behavior_N: torch.Tensor,
    advantages_N: torch.Tensor,
    rows: TokenRowMap,
    config: ObjectiveConfig,
    scale_N: torch.Tensor | None = None,
    custom: CustomLoss | None = None,
    reference_N: torch.Tensor | None = None,
) -> PolicyLoss:
    """Compute `-sum_n w_n f(r_n, A_n)`, r = pi/pi_proximal, w = pi_proximal/pi_behavior.

    f is the surrogate; the terms of `custom` replace it. The gradient flows through `logprobs_N`,
    the log-probabilities under the weights in training. Terms are multiplied by `scale_N`
    (`compute_loss_aggregation_row_factors`). `kl.placement=loss` adds `- kl.coef * w k` to every
    term, k the estimated divergence from `reference_N`. With `ratio_level=sequence` this and its
    backward pass are collectives of `rows.group`.
    """
    proximal_N = proximal_N.detach()
    correction = compute_importance_weights(proximal_N, behavior_N, rows, config)
    raw_N, weight_N = correction.raw_N, correction.weight_N
    log_ratio_N = logprobs_N - proximal_N
    if config.ratio_level == "sequence":
        log_ratio_N = rows.compute_row_means(log_ratio_N)
    ratio_N = log_ratio_N.exp()
    if custom is not None:
        inputs = LossInputs(logprobs_N, proximal_N, behavior_N, advantages_N, rows, config)
        outputs = custom(inputs)
        terms_N, clipped_N = outputs.terms_N, outputs.clipped_N
        if clipped_N is None:
            clipped_N = torch.zeros_like(logprobs_N, dtype=torch.bool)
    else:
        terms_N, clipped_N = _compute_surrogate(
            logprobs_N, proximal_N, ratio_N, advantages_N, config
        )
    terms_N = terms_N * weight_N
    gap = logprobs_N.new_zeros(())
    if reference_N is not None:
        gap = (logprobs_N.detach() - reference_N).sum()
        if config.kl.placement == "loss":
            divergence_N = estimate_divergence(logprobs_N, reference_N, config.kl.estimator)
            terms_N = terms_N - config.kl.coef * weight_N * divergence_N
    total = -(terms_N if scale_N is None else terms_N * scale_N).sum()
    measured = (
        total.detach(),
        clipped_N.sum(),
        correction.outside_N.sum(),
        raw_N.sum(),
        weight_N.sum(),
        weight_N.square().sum(),
        correction.kl_N.sum(),
        gap,
    )
    sums = dict(zip(LOSS_SUM_NAMES, (value.double() for value in measured), strict=True))
    return PolicyLoss(
        total=total,
        sums=sums,
        largest_weight=raw_N.max() if raw_N.numel() else raw_N.new_zeros(()),
        ratio_N=ratio_N.detach(),
        clipped_N=clipped_N,
        outside_N=correction.outside_N,
    )


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeights:
    """Behavior weights of some tokens after the correction. No gradient flows through them."""

    weight_N: torch.Tensor
    """Factor of each token's term of the objective; 0 where it is masked."""
    raw_N: torch.Tensor
    """Importance weight before the bounds: the token's, or the geometric mean of its row."""
    outside_N: torch.Tensor
    """Tokens whose weight or divergence was out of bounds: clamped or masked."""
    kl_N: torch.Tensor
    """Estimate of KL(behavior || proximal), never negative: k3 of joschu.net/blog/kl-approx."""


def compute_importance_weights(
    proximal_N: torch.Tensor, behavior_N: torch.Tensor, rows: TokenRowMap, config: ObjectiveConfig
) -> ImportanceWeights:
    """Weigh tokens as the objective requires. A collective of `rows.group` at level `sequence`.

    A value that is not a number is never out of bounds: it reaches the loss, which reveals it.
    """
    log_ratio_N = (proximal_N - behavior_N).detach()
    raw_N = log_ratio_N.exp()
    kl_N = (torch.expm1(log_ratio_N) - log_ratio_N).clamp(min=0)
    if config.off_policy_correction == "none":
        return ImportanceWeights(torch.ones_like(raw_N), raw_N, torch.zeros_like(raw_N) != 0, kl_N)
    by_row, metric = (
        config.off_policy_correction_level == "sequence",
        config.off_policy_correction_metric,
    )
    judged_N = {"kl": kl_N, "k2": log_ratio_N.square() / 2}.get(metric, log_ratio_N)
    if by_row:
        judged_N = rows.aggregate_rows_at_tokens(judged_N, config.off_policy_correction_agg)
    if metric == "ratio":
        judged_N = judged_N.exp()
        raw_N = rows.compute_row_means(log_ratio_N).exp() if by_row else raw_N
    low, high = config.off_policy_correction_low, config.off_policy_correction_high
    # 0 is no lower bound: only k1 has values below it.
    outside_N = (judged_N < (low or -torch.inf)) | (judged_N > high)
    bounded_N = raw_N.clamp(low, high) if config.off_policy_correction == "clamp" else 0.0
    return ImportanceWeights(torch.where(outside_N, bounded_N, raw_N), raw_N, outside_N, kl_N)


def _compute_surrogate(
    logprobs_N: torch.Tensor,
    proximal_N: torch.Tensor,
    ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    config: ObjectiveConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the surrogate's terms of ratio and advantage, and the tokens at which the clip acted.

    `clip`: min(r A, clip(r) A) (PPO, arXiv:1707.06347, equation 7); with `clip_dual` c, where
    A < 0, max(that, c A) (arXiv:1912.09729). `cispo`: sg(clip(r)) A log pi (arXiv:2506.13585,
    equation 4). `dppo`: r A, without the tokens whose probability has left its bounds in the
    direction of A (arXiv:2602.04879, Binary-TV). `none`: A log pi. At level `sequence` the ratio is
    that of GSPO (arXiv:2507.18071, equation 7).
    """
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    match config.surrogate:
        case "none":
            return advantages_N * logprobs_N, torch.zeros_like(ratio_N) != 0
        case "cispo":
            return bounded_N.detach() * advantages_N * logprobs_N, bounded_N != ratio_N
        case "dppo":
            moved_N = (logprobs_N.exp() - proximal_N.exp()).detach()
            is_up_N = (advantages_N > 0) & (moved_N > config.clip_high)
            masked_N = is_up_N | ((advantages_N < 0) & (moved_N < -config.clip_low))
            return (ratio_N * advantages_N).masked_fill(masked_N, 0.0), masked_N
        case "clip":
            free_N, bound_N = ratio_N * advantages_N, bounded_N * advantages_N
            terms_N, clipped_N = torch.minimum(free_N, bound_N), bound_N < free_N
            if config.clip_dual is not None:
                floor_N = config.clip_dual * advantages_N
                raised_N = (advantages_N < 0) & (terms_N < floor_N)
                terms_N, clipped_N = torch.where(raised_N, floor_N, terms_N), clipped_N | raised_N
            return terms_N, clipped_N


def interpolate_logprobs(
    current_logprobs_N: torch.Tensor,
    behavior_N: torch.Tensor,
    age_N: torch.Tensor,
    updates_done_share: float,
) -> torch.Tensor:
    """Interpolate proximal log-probabilities linearly between the behavior's and the current ones.

    Policies are assumed to move evenly, one version per step. A token sampled `age` versions before
    the step began, and scored after `updates_done_share` of the step's updates, has its proximal
    policy at age / (age + share) of the way. Both ends are exact: before the first update the
    current weights are the proximal ones, and they sampled every token of age 0. AReaL's log-linear
    approximation is this formula with `updates_done_share` 1 throughout.
    """
    if updates_done_share == 0:
        return current_logprobs_N
    return torch.lerp(behavior_N, current_logprobs_N, age_N / (age_N + updates_done_share))


def estimate_divergence(
    logprobs_N: torch.Tensor, reference_N: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Estimate the divergence at each token, in nats; the gradient flows through `logprobs_N`."""
    gap_N = logprobs_N - reference_N
    match estimator:
        case "k1":
            return gap_N
        case "k2":
            return gap_N.square() / 2
        case "k3":
            return torch.expm1(-gap_N) + gap_N


def compute_loss_aggregation_row_factors(
    tokens_per_row: Sequence[int], episode_per_row: Sequence[Hashable], objective: ObjectiveConfig
) -> list[float] | None:
    """Return the factor of each row's terms, relative to the mean over tokens; None if all are 1.

    With N trained tokens of the batch, n episodes and T_i tokens of episode i:

    | `loss_agg` | loss |
    |---|---|
    | `token_mean` | sum of all terms / N (DAPO, arXiv:2503.14476, section 3.3) |
    | `seq_mean_token_mean` | 1/n sum_i (1/T_i) sum_t (GRPO, arXiv:2402.03300, section 4.1.1) |
    | `seq_mean_token_sum` | 1/n sum_i sum_t |
    | `seq_mean_token_sum_norm` | the same / `loss_scale_tokens` (arXiv:2503.20783, section 3.2) |
    """
    if objective.loss_agg == "token_mean":
        return None
    tokens_of = Counter[Hashable]()
    for count, episode in zip(tokens_per_row, episode_per_row, strict=True):
        tokens_of[episode] += count
    sequences = sum(count > 0 for count in tokens_of.values())
    per_sequence = sum(tokens_per_row) / max(1, sequences)
    match objective.loss_agg:
        case "seq_mean_token_mean":
            return [per_sequence / max(1, tokens_of[episode]) for episode in episode_per_row]
        case "seq_mean_token_sum":
            return [per_sequence] * len(tokens_per_row)
        case "seq_mean_token_sum_norm":
            assert objective.loss_scale_tokens is not None
            return [per_sequence / objective.loss_scale_tokens] * len(tokens_per_row)


def compute_minibatch_factors(
    scored: Sequence[int], trained: Sequence[int] | None = None
) -> list[float]:
    """Return the factor of each minibatch's loss, by their numbers of scored tokens.

    A pass divides by the scored tokens of its minibatch. With this factor a minibatch's loss is its
    share of the batch's loss times the number of minibatches, so that a token has equal weight in
    each. The batch's loss is a mean over its `trained` tokens, by default all that are scored.
    """
    trained = scored if trained is None else trained
    mean = sum(trained) / len(trained) if trained else 0.0
    return [count / mean if mean else 1.0 for count in scored]


VALUE_SUM_NAMES = ("value_loss", "value_clipped", "tokens")
"""Names of sums over tokens: the loss, the tokens whose gradient the clip removed, all tokens."""


def compute_value_loss(
    values_N: torch.Tensor,
    before_N: torch.Tensor,
    returns_N: torch.Tensor,
    clip_value: float | None,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Sum max((V - R)^2, (clip(V) - R)^2) / 2, with clip(V) within `clip_value` of `before_N`.

    This is the pessimistic choice, like that of a clipped surrogate; None clips nothing. The
    gradient flows through `values_N`.

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
    return total, dict(zip(VALUE_SUM_NAMES, (value.double() for value in measured), strict=True))
