"""Reference trainer: transformers in float64, losses in numpy, AdamW written out."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.wire.trajectory import TrajectoryRow
from tests.support.loss_reference import Array, Tokens, aggregate, loss_and_gradient


def load_float64_model(model_dir: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    # transformers gives the embedding of a padding token no gradient; here it is like others.
    model.get_input_embeddings().padding_idx = None
    return model


def score_row(model: Any, row: TrajectoryRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities of a row's trained tokens, and entropies of their distributions."""
    ids = torch.from_numpy(row.input_ids_T).long()
    logprobs_TV = torch.log_softmax(model(ids[None]).logits[0, :-1] / row.temperature, -1)
    is_trained = torch.from_numpy(row.loss_mask_T[1:] != 0)
    entropies_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(-1, ids[1:, None])[is_trained, 0], entropies_T[is_trained]


def compute_cross_entropy(model: Any, rows: Sequence[TrainingRow]) -> torch.Tensor:
    """Compute the mean cross entropy of the tokens that the rows learn."""
    terms = []
    for row in rows:
        ids = torch.from_numpy(row.input_ids_T).long()
        logprobs_TV = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        is_learned = torch.from_numpy(row.loss_mask_T[1:] != 0)
        terms.append(-logprobs_TV.gather(-1, ids[1:, None])[is_learned, 0])
    return torch.cat(terms).mean()


def measure_gradient_norm(model: Any) -> float:
    squares = [(p.grad**2).sum() for p in model.parameters() if p.grad is not None]
    return torch.stack(squares).sum().sqrt().item()


class Float64Trainer:
    """A policy of one process that trains on batches whose episodes are rows."""

    def __init__(
        self,
        model_dir: Path,
        objective: ObjectiveConfig,
        adam: AdamConfig,
        *,
        steps: int,
        minibatches: int,
    ) -> None:
        self._model = load_float64_model(model_dir)
        self._objective, self._adam = objective, adam
        self._steps, self._minibatches = steps, minibatches
        self._parameters = [*self._model.parameters()]
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._parameters]
        self._batches = self._updates = 0

    def train_batch(self, rows: Sequence[TrajectoryRow]) -> tuple[float, float]:
        """Train on a batch; its loss, and the largest gradient norm of its updates."""
        with torch.no_grad():
            proximal = torch.cat([score_row(self._model, row)[0] for row in rows]).numpy()
        masks = [row.loss_mask_T[1:] != 0 for row in rows]
        row_of = np.repeat(np.arange(len(rows)), [np.count_nonzero(mask_T) for mask_T in masks])
        behavior = np.concatenate(
            [row.logprobs_T[1:][mask_T] for row, mask_T in zip(rows, masks, strict=True)]
        ).astype(np.float64)
        advantages = compute_advantages(rows, self._objective)[row_of]
        whole = Tokens(proximal, proximal, behavior, advantages, row_of, row_of)
        weights = aggregate(whole, self._objective)
        loss, norms = 0.0, []
        for hand in range(self._minibatches):
            own = np.flatnonzero(row_of % self._minibatches == hand)
            scored = torch.cat(
                [score_row(self._model, row)[0] for row in rows[hand :: self._minibatches]]
            )
            part = Tokens(
                scored.detach().numpy(), proximal[own], behavior[own], advantages[own],
                row_of[own], row_of[own],
            )  # fmt: skip
            part_loss, slopes = loss_and_gradient(part, self._objective, weights[own])
            loss += part_loss
            scored.backward(torch.from_numpy(slopes * self._minibatches))
            norms.append(self._update())
        self._batches += 1
        return loss, max(norms)

    def fine_tune(self, rows: Sequence[TrainingRow]) -> tuple[float, float]:
        """Take one step on the cross entropy of what is learned; its loss and gradient norm."""
        loss = compute_cross_entropy(self._model, rows)
        loss.backward()
        norm = self._update()
        self._batches += 1
        return loss.item(), norm

    def _update(self) -> float:
        """Take one step of AdamW with a clipped gradient; return the norm before clipping."""
        adam = self._adam
        gradients = [parameter.grad for parameter in self._parameters]
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        share = min(1.0, adam.clip_grad / (norm + 1e-6)) if adam.clip_grad else 1.0
        self._updates += 1
        rate, (low, high) = self._compute_rate(), adam.betas
        with torch.no_grad():
            for parameter, gradient, (first, second) in zip(
                self._parameters, gradients, self._moments, strict=True
            ):
                if parameter.ndim > 1:  # neither norms nor biases
                    parameter.mul_(1 - rate * adam.weight_decay)
                first.lerp_(gradient * share, 1 - low)
                second.lerp_((gradient * share) ** 2, 1 - high)
                spread = (second / (1 - high**self._updates)).sqrt() + adam.eps
                parameter.sub_(rate * first / (1 - low**self._updates) / spread)
                parameter.grad = None
        return norm

    def _compute_rate(self) -> float:
        """The learning rate of the batch: a warm-up, then a cosine down to nothing."""
        assert self._adam.decay == "cosine"
        warmup = self._adam.warmup_steps
        if self._batches < warmup:
            return self._adam.lr * (self._batches + 1) / warmup
        share = (self._batches - warmup) / max(1, self._steps - 1 - warmup)
        return self._adam.lr * (1 + math.cos(math.pi * share)) / 2


def compute_advantages(rows: Sequence[TrajectoryRow], objective: ObjectiveConfig) -> Array:
    rewards = np.array([row.reward for row in rows])
    groups = np.array([row.ticket_id for row in rows])
    advantages = np.empty(len(rows))
    for index, group in enumerate(groups):
        own = rewards[groups == group]
        baseline = {
            "group_mean": own.mean(),
            "leave_one_out": (own.sum() - rewards[index]) / (len(own) - 1),
        }[objective.baseline]
        spread = {"group": own.std(ddof=1), "none": 1.0}[objective.scale_rewards]
        advantages[index] = (rewards[index] - baseline) / spread
    return advantages
