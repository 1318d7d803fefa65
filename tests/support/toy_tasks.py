"""Tiny tasks whose episodes can be enumerated, and the true gradient of each.

The policy is a table: 13 contexts, 4 tokens each. Episodes have up to three replies of one token
(token 3 ends them), or a reply with two branches.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.wire.proxy import ExportSettings
from tests.support.sample_episodes import MadeUpTurn

Array = npt.NDArray[np.float64]
VOCAB, MAX_TURNS, END = 4, 3, 3
CONTEXTS = 1 + 3 + 9
NOBODY = 99
"""The parent of a reply that begins a conversation."""


@dataclass(frozen=True)
class ToyEpisode:
    choices: tuple[tuple[int, int], ...]
    """Context and token of each reply."""
    turns: tuple[MadeUpTurn, ...]

    @property
    def reward(self) -> float:
        return math.fsum(turn.reward or 0.0 for turn in self.turns)


@dataclass(frozen=True)
class ToyTask:
    """Episodes, their chances, and their best estimate."""

    episodes: list[ToyEpisode]
    policy: Array
    """The trainer's, context by token."""
    sampled: Array
    """Probability of each episode of a group."""
    behavior: Array
    """The policy whose log-probabilities were recorded."""
    target: Array
    """Weight of each episode's reward in the run's aim."""
    keep: Callable[[Sequence[int]], Iterator[tuple[Sequence[int], float]]]
    """The groups that are trained of the episodes that were begun, with their shares."""
    begun: int
    """Episodes begun for a group."""
    trained: Array = field(default_factory=lambda: np.ones((CONTEXTS, VOCAB)))
    """1 at the parameters that can be learned, 0 where something else acts."""
    reference: Array | None = None
    """The policy that the trained one is kept near, context by token."""
    teacher: Array | None = None
    """The policy that it is drawn to, likewise."""
    penalty: float = 0.0
    """Cost of the divergence from either."""
    critic: Array | None = None
    """Values of a critic in each context."""
    settings: ExportSettings = field(default_factory=ExportSettings)
    """Settings by which episodes become rows."""

    @cached_property
    def truth(self) -> Array:
        """Compute the gradient, by the policy's logits, of the run's aim in the mean."""
        near = self.teacher if self.reference is None else self.reference
        costs = np.zeros_like(self.policy)
        if near is not None:
            gaps = compute_logprobs(self.policy) - compute_logprobs(near)
            costs = self.penalty * gaps * self.trained
        truth = np.zeros_like(self.policy)
        for episode, chance in zip(self.episodes, self.target, strict=True):
            earned = episode.reward - sum(costs[choice] for choice in episode.choices)
            for choice in episode.choices:
                truth += chance * earned * score(self.policy, choice)
        return np.asarray(truth * self.trained)


def make_policy(seed: int) -> Array:
    return softmax(np.random.default_rng(seed).normal(0, 1, (CONTEXTS, VOCAB)))


def softmax(logits: Array) -> Array:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))


def get_context(history: Sequence[int]) -> int:
    """The number of the context after these tokens, none of them the last of an episode."""
    if len(history) < 2:
        return 1 + history[0] if history else 0
    return 4 + 3 * history[0] + history[1]


def list_linear_episodes(seed: int, kind: str) -> list[ToyEpisode]:
    """List conversations, with a reward at the end, or with `turn` one for each reply."""
    generator = np.random.default_rng(seed + 1000)
    episodes = []
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
            episodes.append(make_episode(choices, rewards))
    if kind == "turn":
        earned = generator.random((CONTEXTS, VOCAB))
        episodes = [make_episode(old.choices, [earned[c] for c in old.choices]) for old in episodes]
    return episodes


def make_episode(
    choices: tuple[tuple[int, int], ...], rewards: Sequence[float | None]
) -> ToyEpisode:
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


AGENTS: dict[str, list[tuple[int, tuple[float, float]]]] = {
    "a sub-agent as a tool": [(NOBODY, (0, 1)), (NOBODY, (2, 3)), (0, (4, 5))],
    "a hand-off before the end": [(NOBODY, (0, 3)), (NOBODY, (2, 4)), (1, (5, 6))],
    "a vote": [(NOBODY, (0, 1)), (NOBODY, (2, 3)), (NOBODY, (4, 5))],
    "a title that ends last": [(NOBODY, (0, 1)), (0, (2, 3)), (NOBODY, (2.5, 3.5))],
}
"""Replies as pairs of the reply that each extends, and its time."""


def list_agents_episodes(seed: int, agent: str, named: int | None = None) -> list[ToyEpisode]:
    """Three replies of several conversations, judged together.

    The reward is the episode's, or it names a reply by its number. A title earns nothing.
    """
    judge = np.random.default_rng(seed + 2500).normal(0, 1, (VOCAB,) * MAX_TURNS)
    if "title" in agent:
        judge = np.broadcast_to(judge[:, :, :1], judge.shape)
    rewarded = MAX_TURNS - 1 if named is None else named
    episodes = []
    for tokens in itertools.product(range(VOCAB), repeat=MAX_TURNS):
        first, second, _ = tokens
        contexts = (0, 1 + first % 3, 4 + 3 * (first % 3) + second % 3)
        if agent == "a vote":
            contexts = (0, 0, 0)
        turns = tuple(
            MadeUpTurn(
                parent,
                float(judge[tokens]) if number == rewarded else None,
                1,
                is_named=named is not None,
                during=during,
            )
            for number, (parent, during) in enumerate(AGENTS[agent])
        )
        episodes.append(ToyEpisode(tuple(zip(contexts, tokens, strict=True)), turns))
    return episodes


def make_task(
    episodes: list[ToyEpisode],
    policy: Array,
    n: int = 2,
    success: Callable[[ToyEpisode], float] = lambda _: 1.0,
) -> ToyTask:
    """A task of groups of `n` episodes, each repeated until it succeeds.

    The run is after the mean reward, a failure earning 0.
    """
    chances = count_chances(episodes, policy) * [success(episode) for episode in episodes]
    sampled = chances / chances.sum()
    return ToyTask(
        episodes, policy, sampled, policy, chances, lambda group: iter([(group, 1.0)]), n
    )


def count_chances(episodes: Sequence[ToyEpisode], policy: Array) -> Array:
    return np.array([math.prod(policy[choice] for choice in own.choices) for own in episodes])


def compute_logprobs(policy: Array) -> Array:
    """Log-probabilities; those of tokens that cannot be sampled are never looked at."""
    return np.log(np.where(policy > 0, policy, 1.0))


def disturb(policy: Array, sigma: float, seed: int) -> Array:
    """A policy with noise on all logits. What cannot be sampled stays so."""
    noisy = policy * np.exp(np.random.default_rng(seed).normal(0, sigma, policy.shape))
    return np.asarray(noisy / noisy.sum(axis=1, keepdims=True))


def compute_values(task: ToyTask, credit: str = "turn") -> Array:
    """Compute the mean earnings of sampled episodes that come through each context.

    With `turn` the rest of a conversation from there on, with `episode` all of its rewards.
    """
    chances, earned = np.zeros(CONTEXTS), np.zeros(CONTEXTS)
    for episode, chance in zip(task.episodes, task.sampled, strict=True):
        for index, (context, _) in enumerate(episode.choices):
            turns = episode.turns[index:] if credit == "turn" else episode.turns
            chances[context] += chance
            earned[context] += chance * math.fsum(turn.reward or 0.0 for turn in turns)
    return np.asarray(earned / np.where(chances > 0, chances, 1.0))


def act_otherwise(task: ToyTask, acting: Array, acts_at: Array, *, is_target: bool) -> ToyTask:
    """Have the task sampled by another policy than the trainer assumes.

    Args:
        task: As it was.
        acting: The policy that samples.
        acts_at: 1 at parameters of the trainer's policy that it has, 0 where something else acts.
        is_target: The reward under it is what the run is after, not that of the trainer's policy;
            its log-probabilities are then recorded as if they were the trainer's.
    """
    chances = count_chances(task.episodes, acting)
    sampled = chances / chances.sum()
    if not is_target:
        return replace(task, sampled=sampled, behavior=acting)
    return replace(task, sampled=sampled, target=chances, trained=acts_at)


def take_best(policy: Array, contexts: slice) -> Array:
    acting = policy.copy()
    acting[contexts] = np.eye(VOCAB)[policy[contexts].argmax(axis=1)]
    return acting


def take_likely(policy: Array, top_p: float, contexts: slice) -> Array:
    """Make a policy that in some contexts takes one of the likeliest tokens, `top_p` of them."""
    acting = policy.copy()
    for row in acting[contexts]:  # each a view
        order = np.argsort(-row)
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= top_p]] = 0.0
        row /= row.sum()
    return acting


def record_turns(task: ToyTask, turns: Sequence[int], **recorded: Any) -> ToyTask:
    """Add a proxy's records of the sampling of these replies to the task."""
    episodes = []
    for episode in task.episodes:
        changed = [replace(t, **recorded) if i in turns else t for i, t in enumerate(episode.turns)]
        episodes.append(replace(episode, turns=tuple(changed)))
    return replace(task, episodes=episodes)


def train_failures(task: ToyTask, success: Callable[[ToyEpisode], float]) -> ToyTask:
    """`failed_episodes={reward: 0}`: groups of which all failed are dropped."""
    succeeds = np.array([success(episode) for episode in task.episodes])
    chances, first = count_chances(task.episodes, task.policy), len(task.episodes)
    failed = [make_episode(old.choices, [0.0] * len(old.choices)) for old in task.episodes]

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        if min(group) < first:
            yield group, 1.0

    return replace(
        task,
        episodes=[*task.episodes, *failed],
        sampled=np.concatenate([chances * succeeds, chances * (1 - succeeds)]),
        target=np.concatenate([chances * succeeds, np.zeros(first)]),
        keep=keep,
    )


def keep_those_that_succeed(task: ToyTask, success: Callable[[ToyEpisode], float]) -> ToyTask:
    """`min_samples=2` of 3 without repetition: groups of which less are left are dropped."""
    succeeds = [success(episode) for episode in task.episodes]
    chances = count_chances(task.episodes, task.policy) * succeeds
    failed = len(task.episodes)

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        left = [number for number in group if number != failed]
        if len(left) >= 2:
            yield left, 1.0

    return replace(
        task,
        episodes=[*task.episodes, ToyEpisode((), ())],
        sampled=np.append(chances, 1 - chances.sum()),
        target=np.append(chances, 0.0),
        keep=keep,
        begun=3,
    )


def score(policy: Array, choice: tuple[int, int]) -> Array:
    """The gradient of a choice's log-probability by the logits."""
    gradient = np.zeros_like(policy)
    context, token = choice
    gradient[context] = -policy[context]
    gradient[context, token] += 1
    return gradient


def keep_unequal(task: ToyTask) -> ToyTask:
    """`filter_same_reward`."""

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        for kept, share in task.keep(group):
            if len({task.episodes[number].reward for number in kept}) > 1:
                yield kept, share

    return replace(task, keep=keep)


def keep_shortest(task: ToyTask) -> ToyTask:
    """Keep the shortest: with `extra_samples=1` one more is begun, and a longest is given up."""

    def keep(group: Sequence[int]) -> Iterator[tuple[Sequence[int], float]]:
        lengths = [len(task.episodes[number].choices) for number in group]
        last = [index for index, length in enumerate(lengths) if length == max(lengths)]
        for index in last:
            yield [*group[:index], *group[index + 1 :]], 1 / len(last)

    return replace(task, keep=keep, begun=task.begun + 1)
