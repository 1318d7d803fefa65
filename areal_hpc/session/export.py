"""A session's tree -> training rows.

There is one row per leaf: the token sequence from the root to that leaf. A reply that several
leaves share is trained in the first of them and is context in the others, so that each sampled
token is trained once. A path whose replies were sampled at different temperatures gives one row
per temperature, because a row is trained at one.

The reward of a row is that of its leaf; of a leaf without reward, the reward of the last
rewarded interaction of the session. With the usual single reward at the end of an episode all
its rows have the episode's reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_hpc.session.rewards import final_reward
from areal_hpc.session.tree import Interaction, InteractionTree, ids_of
from areal_hpc.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Which episode of which ticket the rows belong to."""

    ticket_id: int
    attempt: int
    episode: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row before its arrays are built."""

    path: list[Interaction]
    trained: frozenset[str]
    """Interactions whose replies this row trains."""
    temperature: float


def plan_rows(tree: InteractionTree) -> list[RowPlan]:
    """The rows of a session, in order of their leaves."""
    plans: list[RowPlan] = []
    covered: set[str] = set()
    for leaf in tree.leaves():
        path = tree.path(leaf)
        fresh = [one for one in path if one.interaction_id not in covered]
        for temperature in dict.fromkeys(one.temperature for one in fresh):
            trained = frozenset(
                one.interaction_id for one in fresh if one.temperature == temperature
            )
            last = max(i for i, one in enumerate(path) if one.interaction_id in trained)
            plans.append(RowPlan(path[: last + 1], trained, temperature))
        covered.update(one.interaction_id for one in fresh)
    return plans


def export_rows(
    tree: InteractionTree, key: EpisodeKey, meta: dict[str, Any] | None = None
) -> list[Trajectory]:
    """The training rows of a session.

    Args:
        tree: All its interactions; at least one must have a reward.
        key: Whose rows these are.
        meta: Added to each row's own.

    Raises:
        ValueError: No interaction has a reward.
    """
    session_reward = final_reward(tree)
    if len(tree) and session_reward is None:
        raise ValueError("a session without any reward cannot be trained on")
    rows = []
    for index, plan in enumerate(plan_rows(tree)):
        reward = plan.path[-1].reward
        if reward is None:
            assert session_reward is not None
            reward = session_reward
        rows.append(_row(plan, key, index, reward, meta or {}))
    return rows


def _row(
    plan: RowPlan, key: EpisodeKey, index: int, reward: float, meta: dict[str, Any]
) -> Trajectory:
    length = plan.path[-1].sequence_tokens
    input_ids_T = np.empty(length, np.int32)
    loss_mask_T = np.zeros(length, np.uint8)
    logprobs_T = np.zeros(length, np.float32)
    versions_T = np.full(length, -1, np.int64)
    at = 0
    for one in plan.path:
        new_ids, output_ids = ids_of(one.new_ids), ids_of(one.output_ids)
        start = at + len(new_ids)
        end = start + len(output_ids)
        input_ids_T[at:start] = new_ids
        input_ids_T[start:end] = output_ids
        if one.interaction_id in plan.trained:
            loss_mask_T[start:end] = 1
            logprobs_T[start:end] = np.frombuffer(one.logprobs, "<f4")
            for span in one.spans:
                versions_T[start + span.start : start + span.end] = span.version
        at = end
    if at != length:
        raise AssertionError(f"the interactions of a path hold {at} tokens, its leaf {length}")
    return Trajectory(
        ticket_id=key.ticket_id,
        attempt=key.attempt,
        episode=key.episode,
        row=index,
        input_ids_T=input_ids_T,
        loss_mask_T=loss_mask_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        reward=reward,
        temperature=plan.temperature or 1.0,  # greedy: the engine's log-probs are unscaled
        meta={
            **meta,
            "messages": [m for one in plan.path for m in (*one.new_messages, one.reply)],
            "interaction_ids": [one.interaction_id for one in plan.path],
            "finish_reasons": [one.finish_reason for one in plan.path],
            "splices": [one.splice for one in plan.path],
        },
    )
