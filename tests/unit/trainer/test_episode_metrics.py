"""What recorded model calls say of a batch's episodes."""

from typing import Any

import pytest

from areal_hpc.trainer.batch.batch_metrics import (
    EpisodeRecord,
    merge_rows_into_episode,
    summarize_episodes,
)
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.row_record import CallRecord, RowRecord


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


def test_a_clock_that_was_set_back_in_a_call_makes_no_time_of_tools() -> None:
    found = summarize_episodes([episode(call("a", 100, 104), call("b", 105, 42))])
    assert found["episode/tool_time_fraction"] == pytest.approx(1 - 4 / 10)


def test_what_rows_do_not_know_is_absent_and_not_zero() -> None:
    assert summarize_episodes([]) == {}
    assert summarize_episodes([merge_rows_into_episode([RowRecord()])]) == {}
    bare = merge_rows_into_episode(
        [RowRecord(calls=[CallRecord(id="a", finish_reason="length", trained=True)])]
    )
    assert summarize_episodes([bare]) == {
        "episode/turns_mean": 1.0,
        "episode/turns_max": 1,
        "reply/cut_fraction": 1.0,
    }


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
