"""What a batch's rows say of its rewards, groups and replies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_hpc.recipe.sections.trainer import ObjectiveConfig
from areal_hpc.rundir.checkpoints import RewardRange
from areal_hpc.trainer.batch.batch_metrics import (
    REPETITION_TAIL_TOKENS,
    EpisodeRecord,
    compute_repeated_ngram_fraction,
    extend_reward_range,
    group_episode_rewards,
    merge_rows_into_episode,
    summarize_episodes,
    summarize_replies,
    summarize_rewards,
)
from areal_hpc.trainer.batch.training_rows import build_rows, measure_share_of_idle_groups
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.trajectory import CallRecord, RowRecord, TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.sample_trajectories import plain_row

DEFAULT_OBJECTIVE = ObjectiveConfig()


def row(ticket: int, episode: int, reward: float, mask: str = "011") -> TrajectoryRow:
    """A row whose model sampled where the mask has a 1."""
    return plain_row([*map(int, mask)], ticket, episode, reward)


def groups(*rewards: list[float]) -> list[TrajectoryRow]:
    """A ticket for each list, an episode for each reward."""
    return [
        row(ticket, at, one) for ticket, own in enumerate(rewards) for at, one in enumerate(own)
    ]


def summarize(
    batch: list[TrajectoryRow],
    seen: RewardRange | None = None,
    objective: ObjectiveConfig = DEFAULT_OBJECTIVE,
) -> dict[str, float]:
    found = group_episode_rewards(batch)
    return summarize_rewards(found, extend_reward_range(seen, found), objective)


def test_groups_that_teach_nothing_are_told_by_where_they_stand() -> None:
    found = summarize(groups([1, 1], [0, 0], [0, 1], [0.5, 0.5]))
    assert found["episodes"] == 8
    assert (found["groups/all_best"], found["groups/all_worst"]) == (0.25, 0.25)
    assert found["reward/mean"] == 0.5
    assert (found["reward/min"], found["reward/max"]) == (0.0, 1.0)
    assert found["reward/std"] == pytest.approx(np.std([1, 1, 0, 0, 0, 1, 0.5, 0.5], ddof=1))
    assert found["reward/standard_error"] == pytest.approx(np.std([1, 0, 0.5, 0.5], ddof=1) / 2)


def test_best_and_worst_are_those_of_the_run_and_a_constant_reward_is_neither() -> None:
    constant = summarize(groups([0.3, 0.3], [0.3, 0.3]))
    assert (constant["groups/all_best"], constant["groups/all_worst"]) == (0.0, 0.0)
    later = summarize(groups([0, 0], [0, 0]), RewardRange(0.0, 1.0))
    assert (later["groups/all_best"], later["groups/all_worst"]) == (0.0, 1.0)
    assert extend_reward_range(RewardRange(0.0, 1.0), [np.array([2.0])]) == RewardRange(0.0, 2.0)
    assert extend_reward_range(None, []) is None


def share_of_idle_groups(batch: list[TrajectoryRow], **keys: Any) -> float:
    objective = ObjectiveConfig(**keys)
    built = build_rows(batch, WeightVersion(1, 0), [GenerationFork(1, 0)], objective)
    return measure_share_of_idle_groups(batch, built)


def test_equal_episodes_with_other_rewards_by_turn_are_not_idle() -> None:
    def episode(number: int, *rewards: float) -> TrajectoryRow:
        calls = [
            CallRecord(
                id=f"{number}-{at}",
                followers=[f"{number}-{at + 1}"] if at + 1 < len(rewards) else [],
                trained=True,
                reward=Reward(reward),
                prompt_tokens=1 + 2 * at,
                reply_tokens=1,
            )
            for at, reward in enumerate(rewards)
        ]
        return replace(row(0, number, sum(rewards), "0101"), record=RowRecord(calls=calls))

    batch = [episode(0, 1.0, 0.0), episode(1, 0.0, 1.0)]
    assert share_of_idle_groups(batch, credit="turn") == 0.0
    assert share_of_idle_groups(batch, credit="episode") == 1.0


def test_replies_are_the_stretches_that_the_model_sampled() -> None:
    found = summarize_replies(
        [row(0, 0, 1.0, "0110001"), row(0, 1, 1.0, "0111"), row(1, 0, 0, "00")]
    )
    assert found["reply/tokens_mean"] == 2.0
    assert found["reply/tokens_max"] == 3
    assert found["reply/tokens_p95"] == pytest.approx(2.9)
    assert summarize_replies([row(0, 0, 1.0, "00")]) == {}


def test_a_loop_at_the_end_of_a_reply_is_repetition_and_two_equal_replies_are_not() -> None:
    fresh = np.arange(600, dtype=np.int32)
    assert compute_repeated_ngram_fraction([fresh, fresh]) == 0.0
    loop = np.concatenate([fresh, np.resize(np.array([7, 8], np.int32), REPETITION_TAIL_TOKENS)])
    assert compute_repeated_ngram_fraction([loop]) == pytest.approx(1 - 2 / 253)
    assert compute_repeated_ngram_fraction([loop[:600]]) == 0.0
    assert compute_repeated_ngram_fraction([fresh[:3]]) == 0.0


def call(name: str, begin: float, end: float, **facts: Any) -> CallRecord:
    given: dict[str, Any] = {"trained": True, "finish_reason": "stop", "prompt_tokens": 10,
                             "reply_tokens": 5}  # fmt: skip
    return CallRecord(id=name, asked_at=begin, answered_at=end, **{**given, **facts})


def episode(*calls: CallRecord, cell: str = "cell-0", begin: float = 100, end: float = 110) -> Any:
    return EpisodeRecord(cell, begin, end, {one.id: one for one in calls})


def test_turns_times_and_tools_are_those_of_the_calls() -> None:
    found = summarize_episodes(
        [
            episode(call("a", 100, 102), call("b", 101, 104), call("c", 108, 109)),
            episode(call("d", 100, 105, finish_reason="length", cached_tokens=8)),
        ]
    )
    assert (found["episode/turns_mean"], found["episode/turns_max"]) == (2.0, 3)
    assert (found["episode/duration_mean_s"], found["episode/duration_max_s"]) == (10.0, 10.0)
    assert found["episode/tool_time_fraction"] == pytest.approx(1 - (4 + 1 + 5) / 20)
    assert found["reply/cut_fraction"] == 0.25
    assert found["generation/tokens_per_s"] == pytest.approx(20 / 9)
    assert found["generation/cached_prompt_fraction"] == pytest.approx(8 / 40)
    assert "generation/slowest_cell_ratio" not in found, "there is one cell"


def test_a_reply_that_rows_of_an_episode_share_counts_once() -> None:
    shared = call("a", 1, 2)
    context = call("a", 1, 2, trained=False, finish_reason="length")
    rows = [
        RowRecord(session_id="s", started_at=1.0, ended_at=5.0, calls=[context, call("b", 2, 3)]),
        RowRecord(session_id="s", started_at=1.0, ended_at=5.0, calls=[shared]),
    ]
    merged = merge_rows_into_episode(rows)
    assert merged.calls["a"] is shared
    assert summarize_episodes([merged])["reply/cut_fraction"] == 0.0


def test_a_slow_cell_is_compared_with_the_fastest() -> None:
    slow = episode(call("a", 100, 108), cell="cell-1")
    found = summarize_episodes([episode(call("b", 100, 102)), slow])
    assert found["generation/slowest_cell_ratio"] == pytest.approx(0.25)


def test_parts_and_metrics_of_rewards_are_means_over_the_episodes_that_have_them() -> None:
    first = Reward(1.0, parts={"format": 0.2}, metrics={"tool_errors": 2})
    second = Reward(0.0, parts={"format": 0.3})
    found = summarize_episodes(
        [
            episode(call("a", 100, 101, reward=first), call("b", 101, 102, reward=second)),
            episode(call("c", 100, 101, reward=second)),
            episode(call("d", 100, 101)),
        ]
    )
    assert found["reward/part/format"] == pytest.approx((0.5 + 0.3) / 2)
    assert found["reward/metric/tool_errors"] == 2.0
