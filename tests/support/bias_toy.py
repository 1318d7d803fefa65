"""Exact bias of objectives: all groups of a tiny task, each with the gradient that it would give.

The policy is a table: 13 contexts, 4 tokens each. Episodes have up to three replies of one token
(token 3 ends them), or a reply with two branches. Rows, advantages, aggregation and loss are the
product's own; only what they are averaged over is done here: every group that can be
sampled, with its probability.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.trainer.batch.training_rows import (
    ADVANTAGE_CHANNEL,
    SCALE_CHANNEL,
    BatchScores,
    build_rows,
)
from areal_hpc.trainer.objective.importance_sampling import TokenRowMap
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.sample_episodes import MadeUpTurn, build_batch

Array = npt.NDArray[np.float64]
VOCAB, MAX_TURNS, END = 4, 3, 3
CONTEXTS = 1 + 3 + 9
NOBODY = 99
"""The parent of a reply that begins a conversation."""


@dataclass(frozen=True)
class ToyEpisode:
    """An episode that can happen: what was sampled where, and what it earned."""

    choices: tuple[tuple[int, int], ...]
    """Context and token of each reply."""
    turns: tuple[MadeUpTurn, ...]

    @property
    def reward(self) -> float:
        """All that was given."""
        return math.fsum(turn.reward or 0.0 for turn in self.turns)


@dataclass(frozen=True)
class ToyTask:
    """Episodes, how likely each is to be sampled, and what the best estimate would be."""

    episodes: list[ToyEpisode]
    policy: Array
    """The trainer's, context by token."""
    sampled: Array
    """Probability of each episode of a group."""
    behavior: Array
    """The policy whose log-probabilities were recorded."""
    truth: Array
    """The gradient of what the run is after."""
    keep: Callable[[Sequence[int]], Iterator[tuple[Sequence[int], float]]]
    """The groups that are trained of the episodes that were begun, with their shares."""
    begun: int
    """Episodes begun for a group."""
    reference: Array | None = None
    """The policy that the trained one is kept near, context by token."""
    critic: Array | None = None
    """What a critic says in each context."""


# Tasks -------------------------------------------------------------------------------------------


def make_policy(seed: int) -> Array:
    """Probabilities of a random policy."""
    return softmax(np.random.default_rng(seed).normal(0, 1, (CONTEXTS, VOCAB)))


def softmax(logits: Array) -> Array:
    """Probabilities of each context."""
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))


def get_context(history: Sequence[int]) -> int:
    """The number of the context after these tokens, none of them the last of an episode."""
    if len(history) < 2:
        return 1 + history[0] if history else 0
    return 4 + 3 * history[0] + history[1]


def list_linear_episodes(seed: int, kind: str) -> list[ToyEpisode]:
    """Conversations, with a reward at the end, or with `turn` one for each reply."""
    generator = np.random.default_rng(seed + 1000)
    found = []
    for length in range(1, MAX_TURNS + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            ended = tokens[-1] == END or length == MAX_TURNS
            if END in tokens[:-1] or not ended:
                continue
            choices = tuple((get_context(tokens[:i]), token) for i, token in enumerate(tokens))
            rewards: list[float | None] = [None] * length
            rewards[-1] = {
                "binary": float(generator.random() < 0.4),
                "graded": float(generator.lognormal()),
                "skewed": float(20.0 if generator.random() < 0.1 else generator.random()),
                "turn": 0.0,
            }[kind]
            found.append(make_episode(choices, rewards))
    if kind == "turn":
        earned = generator.random((CONTEXTS, VOCAB))
        found = [make_episode(one.choices, [earned[c] for c in one.choices]) for one in found]
    return found


def make_episode(
    choices: tuple[tuple[int, int], ...], rewards: Sequence[float | None]
) -> ToyEpisode:
    """One conversation."""
    turns = [MadeUpTurn(i - 1 if i else NOBODY, r, 1) for i, r in enumerate(rewards)]
    return ToyEpisode(choices, tuple(turns))


def list_branched_episodes(seed: int) -> list[ToyEpisode]:
    """A reply that two others extend, each judged by a judge of its own."""
    judges = np.random.default_rng(seed + 2000).normal(0, 1, (2, VOCAB, VOCAB))
    return [
        ToyEpisode(
            ((0, root), (1 + root % 3, left), (4 + root, right)),
            (
                MadeUpTurn(NOBODY, None, 1),
                MadeUpTurn(0, float(judges[0, root, left]), 1),
                MadeUpTurn(0, float(judges[1, root, right]), 1),
            ),
        )
        for root, left, right in itertools.product(range(VOCAB), repeat=3)
    ]


def make_task(
    episodes: list[ToyEpisode],
    policy: Array,
    n: int = 2,
    success: Callable[[ToyEpisode], float] = lambda _: 1.0,
) -> ToyTask:
    """A task of groups of `n` episodes, each repeated until it succeeds.

    The truth is the gradient of the mean reward, a failure earning 0.
    """
    chances = count_chances(episodes, policy) * [success(one) for one in episodes]
    truth = compute_truth(episodes, policy, chances)
    sampled = chances / chances.sum()
    return ToyTask(episodes, policy, sampled, policy, truth, lambda group: iter([(group, 1.0)]), n)


def count_chances(episodes: Sequence[ToyEpisode], policy: Array) -> Array:
    """How likely a policy makes each episode."""
    return np.array([math.prod(policy[choice] for choice in one.choices) for one in episodes])


def compute_truth(episodes: Sequence[ToyEpisode], policy: Array, chances: Array) -> Array:
    """The gradient of the mean reward by the policy's logits."""
    truth = np.zeros_like(policy)
    for one, chance in zip(episodes, chances, strict=True):
        for choice in one.choices:
            truth += chance * one.reward * score(policy, choice)
    return truth


def stay_near(task: ToyTask, reference: Array, coef: float) -> ToyTask:
    """The task of the mean reward less `coef` times the divergence from a reference."""
    gap = np.log(task.policy) - np.log(reference)
    truth = np.zeros_like(task.policy)
    for one, chance in zip(task.episodes, count_chances(task.episodes, task.policy), strict=True):
        earned = one.reward - coef * sum(gap[choice] for choice in one.choices)
        for choice in one.choices:
            truth += chance * earned * score(task.policy, choice)
    return replace(task, reference=reference, truth=truth)


def compute_values(task: ToyTask) -> Array:
    """What is earned in the mean from each context of a conversation on."""
    chances, earned = np.zeros(CONTEXTS), np.zeros(CONTEXTS)
    for one, chance in zip(task.episodes, count_chances(task.episodes, task.policy), strict=True):
        for place, (context, _) in enumerate(one.choices):
            chances[context] += chance
            earned[context] += chance * math.fsum(turn.reward or 0.0 for turn in one.turns[place:])
    return np.asarray(earned / chances)


def act_otherwise(task: ToyTask, acting: Array, acts_at: Array, *, is_target: bool) -> ToyTask:
    """The task sampled by another policy than the trainer takes it for.

    Args:
        task: As it was.
        acting: The policy that samples.
        acts_at: 1 at parameters of the trainer's policy that it has, 0 where something else acts.
        is_target: The reward under it is what the run is after, not that of the trainer's policy;
            its log-probabilities are then recorded as if they were the trainer's.
    """
    chances = count_chances(task.episodes, acting)
    if not is_target:
        return replace(task, sampled=chances / chances.sum(), behavior=acting)
    truth = compute_truth(task.episodes, acting, chances) * acts_at
    return replace(task, sampled=chances / chances.sum(), truth=truth)


def take_best(policy: Array, contexts: slice) -> Array:
    """A policy that is greedy in some contexts."""
    acting = policy.copy()
    acting[contexts] = np.eye(VOCAB)[policy[contexts].argmax(axis=1)]
    return acting


def record_greedy_turn(task: ToyTask, turn: int) -> ToyTask:
    """The task with what a proxy records of episodes whose n-th reply is greedy."""
    found = []
    for one in task.episodes:
        turns = [replace(t, is_greedy=i == turn) for i, t in enumerate(one.turns)]
        found.append(replace(one, turns=tuple(turns)))
    return replace(task, episodes=found)


def train_failures(task: ToyTask, success: Callable[[ToyEpisode], float]) -> ToyTask:
    """`failed_episodes={reward: 0}`: groups of which all failed are dropped."""
    succeeds = np.array([success(one) for one in task.episodes])
    chances, first = count_chances(task.episodes, task.policy), len(task.episodes)
    failed = [make_episode(one.choices, [0.0] * len(one.choices)) for one in task.episodes]

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        if min(group) < first:
            yield group, 1.0

    return replace(
        task,
        episodes=[*task.episodes, *failed],
        sampled=np.concatenate([chances * succeeds, chances * (1 - succeeds)]),
        truth=compute_truth(task.episodes, task.policy, chances * succeeds),
        keep=keep,
    )


def keep_those_that_succeed(task: ToyTask, success: Callable[[ToyEpisode], float]) -> ToyTask:
    """`min_samples=2` of 3 without repetition: groups of which less are left are dropped."""
    succeeds = [success(one) for one in task.episodes]
    chances = count_chances(task.episodes, task.policy) * succeeds
    failed = len(task.episodes)

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        left = [one for one in group if one != failed]
        if len(left) >= 2:
            yield left, 1.0

    return replace(
        task,
        episodes=[*task.episodes, ToyEpisode((), ())],
        sampled=np.append(chances, 1 - chances.sum()),
        truth=compute_truth(task.episodes, task.policy, chances),
        keep=keep,
        begun=3,
    )


def score(policy: Array, choice: tuple[int, int]) -> Array:
    """The gradient of a choice's log-probability by the logits."""
    found = np.zeros_like(policy)
    context, token = choice
    found[context] = -policy[context]
    found[context, token] += 1
    return found


def keep_unequal(task: ToyTask) -> ToyTask:
    """`filter_same_reward`."""

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        for kept, share in task.keep(group):
            if len({task.episodes[one].reward for one in kept}) > 1:
                yield kept, share

    return replace(task, keep=keep)


def keep_shortest(task: ToyTask) -> ToyTask:
    """`extra_samples=1`: one more is begun, and a longest one is given up."""

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        lengths = [len(task.episodes[one].choices) for one in group]
        last = [place for place, length in enumerate(lengths) if length == max(lengths)]
        for place in last:
            yield [*group[:place], *group[place + 1 :]], 1 / len(last)

    return replace(task, keep=keep, begun=task.begun + 1)


# The expected gradient ---------------------------------------------------------------------------


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


def draw_gradients(
    task: ToyTask, objective: ObjectiveConfig, n: int, draws: int, parts: int = 10
) -> list[Array]:
    """Means over groups of `n` that are drawn at random, in so many parts."""
    generator = np.random.default_rng(7)
    groups = generator.choice(len(task.episodes), (parts, draws // parts, n), p=task.sampled)
    share = np.full(draws // parts, parts / draws)
    return [compute_mean_gradient(task, objective, one.tolist(), share) for one in groups]


def compute_mean_gradient(
    task: ToyTask,
    objective: ObjectiveConfig,
    batches: Sequence[Sequence[int]],
    weights: Array,
) -> Array:
    """The weighted mean of the negative loss's derivatives by the logits, over batches."""
    rows_of = [build_batch([[one.turns]], ExportSettings()) for one in task.episodes]
    choices: list[tuple[int, int]] = []
    columns: list[tuple[float, float, int, float]] = []  # advantage, scale, row, weight
    row_number = 0
    for batch, weight in zip(batches, weights, strict=True):
        rows = [replace(row, episode=i) for i, one in enumerate(batch) for row in rows_of[one]]
        scores = _score_rows(task, batch, rows)
        built = build_rows(rows, WeightVersion(1, 0), [GenerationFork(1, 0)], objective, scores)
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
    advantages, scales, numbers, shares = (torch.tensor(one) for one in zip(*columns, strict=True))
    places = tuple(np.array(choices).T)
    logprobs = torch.tensor(np.log(task.policy[places]), requires_grad=True)
    behavior = torch.tensor(np.log(task.behavior[places]))
    loss, _, _ = compute_policy_loss(
        logprobs,
        logprobs.detach(),
        behavior,
        advantages.double(),
        TokenRowMap(numbers.long(), row_number),
        objective,
        scales.double() * shares.double(),
        reference_N=(
            None if task.reference is None else torch.tensor(np.log(task.reference[places]))
        ),
    )
    (slopes,) = torch.autograd.grad(loss, logprobs)
    found = np.zeros_like(task.policy)
    np.add.at(found, places, -slopes.numpy())
    return np.asarray(found - task.policy * found.sum(axis=1, keepdims=True))


def _score_rows(task: ToyTask, batch: Sequence[int], rows: Sequence[TrajectoryRow]) -> BatchScores:
    """What the trainer would find out of a batch's tokens before it is trained."""
    if task.critic is not None:
        return BatchScores(values=_say_values(task, task.critic, batch, rows))
    if task.reference is None:
        return BatchScores()
    scores: list[list[npt.NDArray[np.float32]]] = [[], []]
    for found, policy in zip(scores, (task.policy, task.reference), strict=True):
        for row in rows:
            logprobs_T = np.zeros(row.num_tokens, np.float32)
            for place in np.flatnonzero(row.loss_mask_T):
                choices = task.episodes[batch[row.episode]].choices
                logprobs_T[place] = np.log(policy[choices[row.input_ids_T[place] // 10]])
            found.append(logprobs_T)
    return BatchScores(*scores)


def _say_values(
    task: ToyTask, critic: Array, batch: Sequence[int], rows: Sequence[TrajectoryRow]
) -> list[npt.NDArray[np.float32]]:
    found = []
    for row in rows:
        values_T, choices = (
            np.zeros(row.num_tokens, np.float32),
            task.episodes[batch[row.episode]].choices,
        )
        for place in np.flatnonzero(row.loss_mask_T):
            values_T[place] = critic[choices[row.input_ids_T[place] // 10][0]]
        found.append(values_T)
    return found


def measure_cosine(found: Array, truth: Array) -> float:
    """1 for the same direction."""
    lengths = np.linalg.norm(found) * np.linalg.norm(truth)
    return float((found * truth).sum() / lengths) if lengths else 0.0
