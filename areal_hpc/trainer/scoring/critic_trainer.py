"""The critic beside the policy: a network with a head for values, its steps, its metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_hpc.recipe.sections.trainer import TrainerConfig, compute_learning_rate
from areal_hpc.trainer.batch.packing import (
    TrainingRow,
    count_scored_tokens,
    split_minibatches,
)
from areal_hpc.trainer.batch.training_rows import (
    CRITIC_CHANNELS,
    RETURN_CHANNEL,
    VALUE_CHANNEL,
    BatchScores,
)
from areal_hpc.trainer.checkpoints.rank_state import NetworkWithOptimizer
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.families.weight_map import (
    OUTPUT_LAYER_NAME,
    HfTensorSpec,
    ParamMap,
    TpSplit,
)
from areal_hpc.trainer.model.hf_weights import HfModelReader, load_hf
from areal_hpc.trainer.model.memory_estimate import get_side_layout
from areal_hpc.trainer.model.policy import (
    TORCH_DTYPE_BY_NAME,
    TrainedNetwork,
    build_network,
    prepare_for_training,
)
from areal_hpc.trainer.objective.loss_stats import LossStats
from areal_hpc.trainer.objective.policy_loss import compute_minibatch_factors
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.trainer.step import (
    MicroBatch,
    ScoresByRow,
    apply_gradients,
    make_micro_batches_of_this_rank,
    run_forward_backward,
    score_rows,
)

HEAD_TENSOR_NAME = "score.weight"
"""The head of transformers' classifiers and reward models of one output."""


def load_critic(
    model_dir: Path, config: TrainerConfig, device: torch.device, key: str
) -> TrainedNetwork:
    """The critic of a model directory, which the recipe names at `key`, with its weights."""
    # Its head is never that of the embedding, however the policy's is.
    arch = replace(read_architecture(model_dir), tied=False)
    parallel, dtype = (
        get_side_layout(arch, config.parallel),
        TORCH_DTYPE_BY_NAME[config.dtype],
    )
    network = build_network(arch, parallel, dtype, device, config.activations, gives_values=True)
    critic = prepare_for_training(network, config.activations)
    reader = HfModelReader(model_dir, key)
    critic.weight_map = [one for one in critic.weight_map if one.megatron != OUTPUT_LAYER_NAME]
    if reader.has_tensor(HEAD_TENSOR_NAME):  # else it begins at 0, and so do all values
        head = HfTensorSpec(HEAD_TENSOR_NAME, (1, arch.hidden))
        critic.weight_map.append(ParamMap(OUTPUT_LAYER_NAME, (head,), TpSplit.WHOLE))
    load_hf(critic, reader.read_tensor)
    return critic


CRITIC_MODEL_RECIPE_KEY = "trainer.objective.critic.model"


class CriticTrainer:
    """The critic of a run with its optimizer, at the step that the policy is at."""

    def __init__(self, config: TrainerConfig, model_path: Path, device: torch.device) -> None:
        self._config = config
        self._keys = config.objective.critic
        folder = self._keys.model if isinstance(self._keys.model, Path) else model_path
        self.network = load_critic(folder, config, device, CRITIC_MODEL_RECIPE_KEY)
        self._adam = config.optimizer.model_copy(update={"lr": self._keys.lr})
        self._optimizer: Any = build_optimizer(
            self.network, self._adam, is_offloaded=config.offload.optimizer
        )

    @property
    def state(self) -> NetworkWithOptimizer:
        return self.network, self._optimizer

    def is_warming_up(self, batches: int) -> bool:
        return batches < self._keys.warmup_steps

    def score(self, rows: Sequence[TrainingRow]) -> ScoresByRow:
        """Its values of the states before all trained tokens of the rows. A collective."""
        return score_rows(
            self.network,
            rows,
            minibatch_count=self._config.minibatches,
            max_tokens=self._config.max_tokens_per_microbatch,
        )

    def train(
        self, rows: Sequence[TrainingRow], scores: BatchScores, step: int
    ) -> tuple[dict[str, float], list[float]]:
        """An optimizer step for each mini-batch; metrics and gradient norms. A collective."""
        rate = compute_learning_rate(step, self._config.total_steps, self._adam)
        stats, norms = LossStats(), []
        parts = split_minibatches(rows, self._config.minibatches)
        factors = compute_minibatch_factors([count_scored_tokens(part) for part in parts])
        for part, factor in zip(parts, factors, strict=True):
            batches = make_micro_batches_of_this_rank(
                self.network, part, CRITIC_CHANNELS, self._config.max_tokens_per_microbatch
            )
            loss = partial(self._compute_loss, factor=factor)
            stats.add(run_forward_backward(self.network, batches, loss, backward=True))
            norms.append(apply_gradients(self.network, self._optimizer, rate))
        sums = stats.reduce_over_ranks(VALUE_SUM_NAMES, ()).sums
        tokens = max(1.0, sums["tokens"])
        return {
            "critic/loss": sums["value_loss"] / tokens,
            "critic/clip_fraction": sums["value_clipped"] / tokens,
            # One that is not finite is not hidden by the others: max(1.0, nan) is 1.0.
            "critic/grad_norm": max(norms, default=0.0) if np.isfinite(norms).all() else math.nan,
            "critic/lr": rate,
            **measure_values(rows),
        }, norms

    def _compute_loss(
        self, batch: MicroBatch, values_N: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, LossStats]:
        total, sums = compute_value_loss(
            values_N,
            batch.channels_N[VALUE_CHANNEL],
            batch.channels_N[RETURN_CHANNEL],
            self._keys.clip_value,
        )
        return total * factor, LossStats(sums)


def measure_values(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """What the critic said before the step, and how much of the returns' variance that explains.

    Over the tokens that are trained. The share is 1 of a perfect critic, 0 of one that says the
    same everywhere, below 0 of a worse one, and 0 where all returns are equal.
    """
    seen = [(row.channels, np.append(False, row.loss_mask_T[1:] != 0)) for row in rows]
    values_N, returns_N = (
        np.concatenate(
            [np.empty(0), *(channels[name][mask_T].astype(np.float64) for channels, mask_T in seen)]
        )
        for name in CRITIC_CHANNELS
    )
    if not len(values_N):
        return {"critic/mean_value": 0.0, "critic/explained_variance": 0.0}
    spread = float(returns_N.var())
    left = float((returns_N - values_N).var())
    return {
        "critic/mean_value": float(values_N.mean()),
        "critic/explained_variance": 1.0 - left / spread if spread else 0.0,
    }


VALUE_SUM_NAMES = ("value_loss", "value_clipped", "tokens")
"""Sums over tokens: the loss, those at which the clip took the gradient away, their number."""


def compute_value_loss(
    values_N: torch.Tensor,
    before_N: torch.Tensor,
    returns_N: torch.Tensor,
    clip_value: float | None,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The sum of max((V - R)^2, (clip(V) - R)^2) / 2, clip(V) within `clip_value` of `before_N`.

    The pessimistic one of both, as a clipped surrogate is; None clips nothing. The gradient flows
    through `values_N`.

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
    return total, dict(zip(VALUE_SUM_NAMES, (one.double() for one in measured), strict=True))
