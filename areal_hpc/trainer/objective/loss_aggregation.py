"""Aggregation of a batch's loss: what each token's term weighs in it. Pure.

With N tokens of the batch that are trained, n episodes, T_i tokens of episode i:

| `loss_agg` | loss |
|---|---|
| `token_mean` | sum of all terms / N (DAPO, arXiv:2503.14476, section 3.3) |
| `seq_mean_token_mean` | 1/n sum_i (1/T_i) sum_t (GRPO, arXiv:2402.03300, section 4.1.1) |
| `seq_mean_token_sum` | 1/n sum_i sum_t |
| `seq_mean_token_sum_norm` | the same / `loss_scale_tokens` (arXiv:2503.20783, section 3.2) |

A pass divides by the tokens of its mini-batch. So terms are multiplied by what makes that the
batch's measure: a mini-batch's loss is its share of the batch's times the number of mini-batches,
and a token weighs the same in whichever it lies.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from areal_hpc.recipe.sections.trainer import ObjectiveConfig


def compute_loss_aggregation_row_factors(
    tokens_per_row: Sequence[int], episode_per_row: Sequence[Hashable], objective: ObjectiveConfig
) -> list[float] | None:
    """Factor of the terms of each row, relative to the mean over tokens; None if all are 1.

    Args:
        tokens_per_row: Trained tokens of each row.
        episode_per_row: The episode of each row.
        objective: Says how terms are aggregated.
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


def compute_minibatch_factors(tokens: Sequence[int]) -> list[float]:
    mean = sum(tokens) / len(tokens) if tokens else 0.0
    return [count / mean if mean else 1.0 for count in tokens]
