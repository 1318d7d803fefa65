"""The gradient that an objective follows in the mean over all groups of a tiny task.

Rows, advantages, aggregation and loss are the product's own; only what they are averaged over is
done here: every group that can be sampled, with its probability.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.trainer.batch.training_rows import (
    ADVANTAGE_CHANNEL,
    NO_SCORES,
    SCALE_CHANNEL,
    BatchScores,
    build_rows,
)
from areal_hpc.trainer.objective.importance_sampling import TokenRowMap
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.bias_toy import Array, ToyTask, compute_logprobs
from tests.support.sample_episodes import build_batch


def compute_expected_gradient(task: ToyTask, objective: ObjectiveConfig) -> Array:
    """What a step follows in the mean over all groups, each a batch of its own."""
    weight_of: dict[tuple[int, ...], float] = {}  # the order within a group does not matter
    for group in itertools.combinations_with_replacement(range(len(task.episodes)), task.begun):
        counts = [group.count(one) for one in set(group)]
        orders = math.factorial(len(group)) / math.prod(map(math.factorial, counts))
        chance = orders * math.prod(task.sampled[one] for one in group)
        for kept, share in task.keep(group):
            if chance * share > 0:
                batch = tuple(sorted(kept))
                weight_of[batch] = weight_of.get(batch, 0.0) + chance * share
    weights = np.array([*weight_of.values()])
    return compute_mean_gradient(task, objective, list(weight_of), weights / weights.sum())


def compute_mean_gradient(
    task: ToyTask,
    objective: ObjectiveConfig,
    batches: Sequence[Sequence[int]],
    weights: Array,
) -> Array:
    """The weighted mean of the negative loss's derivatives by the logits, over batches."""
    rows_of = [build_batch([[one.turns]], task.settings) for one in task.episodes]
    kinds = list(dict.fromkeys(one.turns for one in task.episodes))
    kind_of = [kinds.index(one.turns) for one in task.episodes]
    known: dict[tuple[int, ...], list[TrainingRow]] = {}
    choices: list[tuple[int, int]] = []
    columns: list[tuple[float, float, int, float]] = []  # advantage, scale, row, weight
    row_number = 0
    for unordered, weight in zip(batches, weights, strict=True):
        batch = sorted(unordered, key=kind_of.__getitem__)
        rows = [replace(row, episode=i) for i, one in enumerate(batch) for row in rows_of[one]]
        key = tuple(kind_of[one] for one in batch)
        built = known.get(key)
        if built is None:
            scores = _score_rows(task, batch, rows)
            built = build_rows(rows, WeightVersion(1, 0), [GenerationFork(1, 0)], objective, scores)
            if scores is NO_SCORES:  # then what was said where decides nothing
                known[key] = built
        tokens = sum(int(one.loss_mask_T.sum()) for one in built)
        for row, one in zip(rows, built, strict=True):
            scale_T = one.channels.get(SCALE_CHANNEL)
            for place in np.flatnonzero(one.loss_mask_T):
                choices.append(
                    task.episodes[batch[row.episode]].choices[one.input_ids_T[place] // 10]
                )
                scale = 1.0 if scale_T is None else float(scale_T[place])
                advantage = float(one.channels[ADVANTAGE_CHANNEL][place])
                columns.append((advantage, scale, row_number, weight / tokens))
            row_number += 1
    if not columns:
        return np.zeros_like(task.policy)
    advantages, scales, numbers, shares = (torch.tensor(one) for one in zip(*columns, strict=True))
    places = tuple(np.array(choices).T)
    logprobs = torch.tensor(compute_logprobs(task.policy)[places], requires_grad=True)
    behavior = torch.tensor(compute_logprobs(task.behavior)[places])
    loss = compute_policy_loss(
        logprobs,
        logprobs.detach(),
        behavior,
        advantages.double(),
        TokenRowMap(numbers.long(), row_number),
        objective,
        scales.double() * shares.double(),
        reference_N=(
            None
            if task.reference is None
            else torch.tensor(compute_logprobs(task.reference)[places])
        ),
    )
    (slopes,) = torch.autograd.grad(loss.total, logprobs)
    found = np.zeros_like(task.policy)
    np.add.at(found, places, -slopes.numpy())
    return np.asarray(found - task.policy * found.sum(axis=1, keepdims=True))


def _score_rows(task: ToyTask, batch: Sequence[int], rows: Sequence[TrajectoryRow]) -> BatchScores:
    """What the trainer would find out of a batch's tokens before it is trained."""

    def score(table: Array) -> list[npt.NDArray[np.float32]]:
        """What a table has at the choice of each trained token."""
        found = []
        for row in rows:
            scores_T = np.zeros(row.num_tokens, np.float32)
            places = np.flatnonzero(row.loss_mask_T)
            choices = task.episodes[batch[row.episode]].choices
            scores_T[places] = [table[choices[row.input_ids_T[place] // 10]] for place in places]
            found.append(scores_T)
        return found

    if task.critic is not None:
        return BatchScores(values=score(np.broadcast_to(task.critic[:, None], task.policy.shape)))
    if task.reference is None and task.teacher is None:
        return NO_SCORES
    start, reference, teacher = (
        None if policy is None else score(compute_logprobs(policy))
        for policy in (task.policy, task.reference, task.teacher)
    )
    return BatchScores(start, reference, teacher)


def measure_cosine(found: Array, truth: Array) -> float:
    """1 for the same direction."""
    lengths = np.linalg.norm(found) * np.linalg.norm(truth)
    return float((found * truth).sum() / lengths) if lengths else 0.0
