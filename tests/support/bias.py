"""Expected gradient of an objective over tiny tasks, compared with the true one.

Rows, advantages, aggregation and loss are the product's own; this module only averages them, over
every group that can be sampled, with its probability.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.presets import PRESETS
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.batch.packing import Channel, TrainingRow
from areal_hpc.trainer.batch.training_rows import NO_SCORES, BatchScores, build_rows
from areal_hpc.trainer.objective.policy_loss import compute_policy_loss
from areal_hpc.trainer.objective.token_rows import TokenRowMap
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.sample_episodes import build_batch
from tests.support.toy_tasks import (
    AGENTS,
    CONTEXTS,
    MAX_TURNS,
    VOCAB,
    Array,
    ToyEpisode,
    ToyTask,
    act_otherwise,
    compute_logprobs,
    compute_values,
    disturb,
    keep_shortest,
    keep_those_that_succeed,
    keep_unequal,
    list_agents_episodes,
    list_branched_episodes,
    list_linear_episodes,
    make_policy,
    make_task,
    record_turns,
    take_best,
    take_likely,
    train_failures,
)


def compute_expected_gradient(task: ToyTask, objective: ObjectiveConfig) -> Array:
    """Compute the mean step over all groups, each a batch of its own."""
    weight_of: dict[tuple[int, ...], float] = {}  # the order within a group does not matter
    for group in itertools.combinations_with_replacement(range(len(task.episodes)), task.begun):
        counts = [group.count(episode) for episode in set(group)]
        orders = math.factorial(len(group)) / math.prod(map(math.factorial, counts))
        chance = orders * math.prod(task.sampled[episode] for episode in group)
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
    rows_of = [build_batch([[episode.turns]], task.settings) for episode in task.episodes]
    kinds = list(dict.fromkeys(episode.turns for episode in task.episodes))
    kind_of = [kinds.index(episode.turns) for episode in task.episodes]
    known: dict[tuple[int, ...], list[TrainingRow]] = {}
    choices: list[tuple[int, int]] = []
    columns: list[tuple[float, float, int, float]] = []  # advantage, scale, row, weight
    row_number = 0
    for unordered, weight in zip(batches, weights, strict=True):
        batch = sorted(unordered, key=kind_of.__getitem__)
        rows = [replace(row, episode=i) for i, own in enumerate(batch) for row in rows_of[own]]
        key = tuple(kind_of[episode] for episode in batch)
        built = known.get(key)
        if built is None:
            scores = _score_rows(task, batch, rows)
            built = build_rows(rows, WeightVersion(1, 0), [GenerationFork(1, 0)], objective, scores)
            if scores is NO_SCORES:  # then the chosen tokens decide nothing
                known[key] = built
        tokens = sum(int(row.loss_mask_T.sum()) for row in built)
        for row, built_row in zip(rows, built, strict=True):
            scale_T = built_row.channels.get(Channel.SCALE)
            for position in np.flatnonzero(built_row.loss_mask_T):
                choices.append(
                    task.episodes[batch[row.episode]].choices[built_row.input_ids_T[position] // 10]
                )
                scale = 1.0 if scale_T is None else float(scale_T[position])
                advantage = float(built_row.channels[Channel.ADVANTAGE][position])
                columns.append((advantage, scale, row_number, weight / tokens))
            row_number += 1
    if not columns:
        return np.zeros_like(task.policy)
    advantages, scales, numbers, shares = (torch.tensor(col) for col in zip(*columns, strict=True))
    choice_indices = tuple(np.array(choices).T)
    logprobs = torch.tensor(compute_logprobs(task.policy)[choice_indices], requires_grad=True)
    behavior = torch.tensor(compute_logprobs(task.behavior)[choice_indices])
    loss = compute_policy_loss(
        logprobs,
        behavior if objective.proximal == "none" else logprobs.detach(),
        behavior,
        advantages.double(),
        TokenRowMap(numbers.long(), row_number),
        objective,
        scales.double() * shares.double(),
        reference_N=(
            None
            if task.reference is None
            else torch.tensor(compute_logprobs(task.reference)[choice_indices])
        ),
    )
    (slopes,) = torch.autograd.grad(loss.total, logprobs)
    gradient = np.zeros_like(task.policy)
    np.add.at(gradient, choice_indices, -slopes.numpy())
    return np.asarray(gradient - task.policy * gradient.sum(axis=1, keepdims=True))


def _score_rows(task: ToyTask, batch: Sequence[int], rows: Sequence[TrajectoryRow]) -> BatchScores:
    """Compute the scores that the trainer makes of a batch before it is trained."""

    def score(table: Array) -> list[npt.NDArray[np.float32]]:
        """Read a table at the choice of each trained token."""
        scores = []
        for row in rows:
            scores_T = np.zeros(row.num_tokens, np.float32)
            trained = np.flatnonzero(row.loss_mask_T)
            choices = task.episodes[batch[row.episode]].choices
            scores_T[trained] = [table[choices[row.input_ids_T[i] // 10]] for i in trained]
            scores.append(scores_T)
        return scores

    if task.critic is not None:
        return BatchScores(values=score(np.broadcast_to(task.critic[:, None], task.policy.shape)))
    if task.reference is None and task.teacher is None:
        return NO_SCORES
    start, reference, teacher = (
        None if policy is None else score(compute_logprobs(policy))
        for policy in (task.policy, task.reference, task.teacher)
    )
    return BatchScores(start, reference, teacher)


def measure_cosine(gradient: Array, truth: Array) -> float:
    lengths = np.linalg.norm(gradient) * np.linalg.norm(truth)
    return float((gradient * truth).sum() / lengths) if lengths else 0.0


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
"""Settings that presets leave to the recipe."""
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
    """Build the task of a scenario, with the networks that an objective needs.

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
    gradient = compute_expected_gradient(task, OBJECTIVES[name])
    ratio = float(np.linalg.norm(gradient) / np.linalg.norm(task.truth))
    return measure_cosine(gradient, task.truth), ratio
