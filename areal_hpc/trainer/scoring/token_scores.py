"""Numbers of a batch's tokens from networks that score it: log-probabilities, a critic's values."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from areal_hpc.trainer.batch.packing import (
    TEMPERATURE_CHANNEL,
    TrainingRow,
    deal_rows_round_robin_into_minibatches,
)
from areal_hpc.trainer.model.policy import Network
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.step import (
    MicroBatch,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    run_value_passes,
)

ScoresByRow = list[npt.NDArray[np.float32]]
"""For each row a number for each of its tokens: 0 where the loss does not see it."""


def compute_row_logprobs(
    network: Network, rows: Sequence[TrainingRow], *, minibatch_count: int, max_tokens: int
) -> ScoresByRow:
    """Log-probabilities of all trained tokens, on every rank. A collective.

    Rows share passes as they do in training, so that the policy finds the same bits there.
    """
    return _score_by_minibatch(network, rows, minibatch_count, max_tokens, run_forward_backward)


def compute_row_values(
    critic: Network, rows: Sequence[TrainingRow], *, minibatch_count: int, max_tokens: int
) -> ScoresByRow:
    """A critic's values of the states before all trained tokens, likewise. A collective."""
    return _score_by_minibatch(critic, rows, minibatch_count, max_tokens, run_value_passes)


def _score_by_minibatch(
    network: Network,
    rows: Sequence[TrainingRow],
    minibatch_count: int,
    max_tokens: int,
    run: Callable[..., LossStats],
) -> ScoresByRow:
    scores: ScoresByRow = [np.empty(0, np.float32)] * len(rows)
    for hand, part in enumerate(deal_rows_round_robin_into_minibatches(rows, minibatch_count)):
        scores[hand::minibatch_count] = _score_minibatch(network, part, max_tokens, run)
    return scores


def _score_minibatch(
    network: Network, rows: Sequence[TrainingRow], max_tokens: int, run: Callable[..., LossStats]
) -> ScoresByRow:
    channels = [name for name in rows[0].channels if name == TEMPERATURE_CHANNEL]
    found: list[tuple[npt.NDArray[np.int64], torch.Tensor]] = []

    def note(batch: MicroBatch, scores_N: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        found.append((batch.flat_token_indices_N, scores_N))
        return scores_N.sum(), LossStats()

    batches = make_micro_batches_of_this_rank(network, rows, channels, max_tokens)
    run(network, batches, note, backward=False)
    lengths = [len(row.input_ids_T) for row in rows]
    flat = torch.zeros(sum(lengths))
    # The other tensor-parallel ranks found the same.
    if found and parallel_state.get_tensor_model_parallel_rank() == 0:
        places = torch.from_numpy(np.concatenate([tokens_N for tokens_N, _ in found]))
        flat[places] = torch.cat([scores_N for _, scores_N in found]).cpu()
    if dist.get_world_size() > 1:
        dist.all_reduce(flat)
    return np.split(flat.numpy(), np.cumsum(lengths)[:-1])
