"""What an objective follows in the mean over tiny tasks whose episodes can be counted.

The policy is a table: 13 contexts, 4 tokens each. Episodes have up to three replies of one token
(token 3 ends them), or a reply with two branches. Rows, advantages, aggregation and loss are the
product's own; only what they are averaged over is done here: every group that can be sampled, with
its probability. Each task has the gradient that would be right.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.presets import PRESETS
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
    choices: tuple[tuple[int, int], ...]
    """Context and token of each reply."""
    turns: tuple[MadeUpTurn, ...]

    @property
    def reward(self) -> float:
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
    target: Array
    """Weight of each episode's reward in what the run is after."""
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
    """What the divergence from either costs."""
    critic: Array | None = None
    """What a critic says in each context."""
    settings: ExportSettings = field(default_factory=ExportSettings)
    """How episodes become rows."""

    @cached_property
    def truth(self) -> Array:
        """The gradient, by the policy's logits, of what the run is after in the mean."""
        near = self.teacher if self.reference is None else self.reference
        costs = np.zeros_like(self.policy)
        if near is not None:
            gaps = compute_logprobs(self.policy) - compute_logprobs(near)
            costs = self.penalty * gaps * self.trained
        truth = np.zeros_like(self.policy)
        for one, chance in zip(self.episodes, self.target, strict=True):
            earned = one.reward - sum(costs[choice] for choice in one.choices)
            for choice in one.choices:
                truth += chance * earned * score(self.policy, choice)
        return np.asarray(truth * self.trained)


# Tasks -------------------------------------------------------------------------------------------


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
"""Of each reply the one that it extends, and its time."""


def list_agents_episodes(seed: int, agent: str, named: int | None = None) -> list[ToyEpisode]:
    """Three replies of several conversations, judged together.

    The reward is the episode's, or it names a reply by its number. A title earns nothing.
    """
    judge = np.random.default_rng(seed + 2500).normal(0, 1, (VOCAB,) * MAX_TURNS)
    if "title" in agent:
        judge = np.broadcast_to(judge[:, :, :1], judge.shape)
    rewarded = MAX_TURNS - 1 if named is None else named
    found = []
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
        found.append(ToyEpisode(tuple(zip(contexts, tokens, strict=True)), turns))
    return found


def make_task(
    episodes: list[ToyEpisode],
    policy: Array,
    n: int = 2,
    success: Callable[[ToyEpisode], float] = lambda _: 1.0,
) -> ToyTask:
    """A task of groups of `n` episodes, each repeated until it succeeds.

    The run is after the mean reward, a failure earning 0.
    """
    chances = count_chances(episodes, policy) * [success(one) for one in episodes]
    sampled = chances / chances.sum()
    return ToyTask(
        episodes, policy, sampled, policy, chances, lambda group: iter([(group, 1.0)]), n
    )


def count_chances(episodes: Sequence[ToyEpisode], policy: Array) -> Array:
    return np.array([math.prod(policy[choice] for choice in one.choices) for one in episodes])


def compute_logprobs(policy: Array) -> Array:
    """Log-probabilities; those of tokens that cannot be sampled are never looked at."""
    return np.log(np.where(policy > 0, policy, 1.0))


def disturb(policy: Array, sigma: float, seed: int) -> Array:
    """A policy with noise on all logits. What cannot be sampled stays so."""
    noisy = policy * np.exp(np.random.default_rng(seed).normal(0, sigma, policy.shape))
    return np.asarray(noisy / noisy.sum(axis=1, keepdims=True))


def compute_values(task: ToyTask, credit: str = "turn") -> Array:
    """What episodes that are sampled earn in the mean where they come through each context.

    With `turn` the rest of a conversation from there on, with `episode` all of its rewards.
    """
    chances, earned = np.zeros(CONTEXTS), np.zeros(CONTEXTS)
    for one, chance in zip(task.episodes, task.sampled, strict=True):
        for place, (context, _) in enumerate(one.choices):
            turns = one.turns[place:] if credit == "turn" else one.turns
            chances[context] += chance
            earned[context] += chance * math.fsum(turn.reward or 0.0 for turn in turns)
    return np.asarray(earned / np.where(chances > 0, chances, 1.0))


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
    sampled = chances / chances.sum()
    if not is_target:
        return replace(task, sampled=sampled, behavior=acting)
    return replace(task, sampled=sampled, target=chances, trained=acts_at)


def take_best(policy: Array, contexts: slice) -> Array:
    acting = policy.copy()
    acting[contexts] = np.eye(VOCAB)[policy[contexts].argmax(axis=1)]
    return acting


def take_likely(policy: Array, top_p: float, contexts: slice) -> Array:
    """A policy that in some contexts takes one of the likeliest tokens, `top_p` of them."""
    acting = policy.copy()
    for row in acting[contexts]:  # each a view
        order = np.argsort(-row)
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= top_p]] = 0.0
        row /= row.sum()
    return acting


def record_turns(task: ToyTask, turns: Sequence[int], **recorded: Any) -> ToyTask:
    """The task with what a proxy records of how the replies of these numbers were sampled."""
    found = []
    for one in task.episodes:
        changed = [replace(t, **recorded) if i in turns else t for i, t in enumerate(one.turns)]
        found.append(replace(one, turns=tuple(changed)))
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
        target=np.concatenate([chances * succeeds, np.zeros(first)]),
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
        target=np.append(chances, 0.0),
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
    lengths = np.linalg.norm(found) * np.linalg.norm(truth)
    return float((found * truth).sum() / lengths) if lengths else 0.0


SEEDS = (1, 2, 3, 4)
TOP_P = 0.8
EVERYWHERE = np.ones((CONTEXTS, VOCAB))
LATER = EVERYWHERE.copy()
LATER[1:4] = 0
"""All but the second reply."""


def _linear(kind: str) -> Callable[[int], ToyTask]:
    return lambda seed: make_task(list_linear_episodes(seed, kind), make_policy(seed))


def _fails_when_long(episode: ToyEpisode) -> float:
    return 0.2 if len(episode.choices) == 3 else 1.0


def _stale(sigma: float) -> Callable[[int], ToyTask]:
    def make(seed: int) -> ToyTask:
        acting = disturb(make_policy(seed), sigma, seed + 3000)
        return act_otherwise(_linear("graded")(seed), acting, EVERYWHERE, is_target=False)

    return make


def _agents(agent: str, named: int | None = None) -> Callable[[int], ToyTask]:
    return lambda seed: make_task(list_agents_episodes(seed, agent, named), make_policy(seed))


def _chronological(seed: int) -> ToyTask:
    task = _agents("a sub-agent as a tool", named=0)(seed)
    return replace(task, settings=ExportSettings(credit="chronological"))


def _greedy(seed: int) -> ToyTask:
    acting = take_best(make_policy(seed), slice(1, 4))
    task = act_otherwise(_linear("graded")(seed), acting, LATER, is_target=True)
    return record_turns(task, [1], is_greedy=True)


def _nucleus(seed: int) -> ToyTask:
    acting = take_likely(make_policy(seed), TOP_P, slice(1, 4))
    task = act_otherwise(_linear("graded")(seed), acting, LATER, is_target=True)
    return record_turns(task, [1], top_p=TOP_P)


def _recorded_nucleus(seed: int) -> ToyTask:
    policy = take_likely(make_policy(seed), TOP_P, slice(None))
    task = make_task(list_linear_episodes(seed, "graded"), policy)
    return record_turns(task, range(MAX_TURNS), top_p=TOP_P, is_recorded=True)


def _retried(seed: int) -> ToyTask:
    return make_task(
        list_linear_episodes(seed, "binary"), make_policy(seed), success=_fails_when_long
    )


SCENARIOS: dict[str, Callable[[int], ToyTask]] = {
    "binary rewards": _linear("binary"),
    "graded rewards (lognormal)": _linear("graded"),
    "skewed rewards (a few of 20)": _linear("skewed"),
    "a reward for each turn": _linear("turn"),
    "two branches, a judge for each": lambda seed: make_task(
        list_branched_episodes(seed), make_policy(seed)
    ),
    **{f"{agent}, a reward of the episode": _agents(agent) for agent in AGENTS},
    "a sub-agent as a tool, the reward names the first reply": _agents(
        "a sub-agent as a tool", named=0
    ),
    "a sub-agent as a tool, the same, `rollout.agent.credit=chronological`": _chronological,
    "binary, `filter_same_reward`": lambda seed: keep_unequal(_linear("binary")(seed)),
    "binary, `extra_samples=1`": lambda seed: keep_shortest(_linear("binary")(seed)),
    "binary, 80 % of long episodes fail and are repeated": _retried,
    "binary, the same, `failed_episodes={reward: 0}`": lambda seed: train_failures(
        _linear("binary")(seed), _fails_when_long
    ),
    "binary, the same, `min_samples=2` of 3": lambda seed: keep_those_that_succeed(
        _linear("binary")(seed), _fails_when_long
    ),
    "graded, the second turn is greedy": _greedy,
    "graded, the second turn has a `top_p` of .8": _nucleus,
    "graded, `top_p` .8 with `record_sampling_mask`": _recorded_nucleus,
    "graded, noise of .3 on all logits": _stale(0.3),
    "graded, noise of 1 on all logits": _stale(1.0),
}

EXACT: dict[str, Any] = {"surrogate": "none", "loss_agg": "seq_mean_token_sum"}
MORE: dict[str, dict[str, Any]] = {
    "dr_grpo": {"loss_scale_tokens": 3},
    "opd": {"teacher": {"coef": 1.0, "path": "/teacher"}},
}
"""What presets leave to the recipe."""
UNTAUGHT_PPO = "ppo, values of 0"
OBJECTIVES: dict[str, ObjectiveConfig] = {
    **{
        name: ObjectiveConfig.model_validate({**preset.objective, **MORE.get(name, {})})
        for name, preset in PRESETS.items()
    },
    UNTAUGHT_PPO: ObjectiveConfig.model_validate(PRESETS["ppo"].objective),
    "group_mean, none, sums": ObjectiveConfig(scale_rewards="none", **EXACT),
    "rloo, credit=turn": ObjectiveConfig(
        credit="turn", baseline="leave_one_out", scale_rewards="none", **EXACT
    ),
    "reinforce, credit=turn": ObjectiveConfig(
        credit="turn", baseline="none", scale_rewards="none", **EXACT
    ),
}
"""Presets and, where they are not exact, what makes them so. At the weights that a step begins
with, where ratios are 1."""


def prepare(scenario: str, name: str, seed: int) -> ToyTask:
    """The task of a scenario with what an objective has beside it.

    A reference has noise of .3 on all logits, a teacher of 1. A critic has learned all that can be
    learned, or nothing.
    """
    task, objective = SCENARIOS[scenario](seed), OBJECTIVES[name]
    if PRESETS.get(name) and PRESETS[name].values_outside_objective.get(
        "rollout.filter_same_reward"
    ):
        task = keep_unequal(task)
    if objective.kl.coef:
        near = disturb(task.policy, 0.3, seed + 5000)
        return replace(task, reference=near, penalty=objective.kl.coef)
    if objective.teacher.coef:
        teacher = disturb(task.policy, 1.0, seed + 6000)
        return replace(task, teacher=teacher, penalty=objective.teacher.coef)
    if objective.has_critic:
        knows = 0.0 if name == UNTAUGHT_PPO else 1.0
        return replace(task, critic=knows * compute_values(task, objective.credit))
    return task


def measure(scenario: str, name: str, seed: int) -> tuple[float, float]:
    task = prepare(scenario, name, seed)
    found = compute_expected_gradient(task, OBJECTIVES[name])
    ratio = float(np.linalg.norm(found) / np.linalg.norm(task.truth))
    return measure_cosine(found, task.truth), ratio
