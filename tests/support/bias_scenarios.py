"""Tasks and objectives whose expected gradient is compared with the true one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.presets import PRESETS
from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.wire.proxy import ExportSettings
from tests.support.bias_gradient import compute_expected_gradient, measure_cosine
from tests.support.bias_toy import (
    AGENTS,
    CONTEXTS,
    MAX_TURNS,
    VOCAB,
    ToyEpisode,
    ToyTask,
    act_otherwise,
    compute_values,
    disturb,
    follow_teacher,
    keep_shortest,
    keep_those_that_succeed,
    keep_unequal,
    list_agents_episodes,
    list_branched_episodes,
    list_linear_episodes,
    make_policy,
    make_task,
    record_turns,
    stay_near,
    take_best,
    take_likely,
    train_failures,
)

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
        return stay_near(task, disturb(task.policy, 0.3, seed + 5000), objective.kl.coef)
    if objective.teacher.coef:
        return follow_teacher(task, disturb(task.policy, 1.0, seed + 6000), objective.teacher.coef)
    if objective.has_critic:
        knows = 0.0 if name == UNTAUGHT_PPO else 1.0
        return replace(task, critic=knows * compute_values(task, objective.credit))
    return task


def measure(scenario: str, name: str, seed: int) -> tuple[float, float]:
    """Cosine with the true gradient, and the ratio of norms, in groups of two."""
    task = prepare(scenario, name, seed)
    found = compute_expected_gradient(task, OBJECTIVES[name])
    ratio = float(np.linalg.norm(found) / np.linalg.norm(task.truth))
    return measure_cosine(found, task.truth), ratio
