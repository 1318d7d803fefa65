"""Metrics of a batch's rows, of an update and of its GPUs; alerts across restarts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.metrics.step_metrics import find_best_step, read_metrics
from areal_hpc.metrics.writer import (
    AlertReporter,
    MetricsWriter,
    StepRecord,
    replace_non_finite_by_none,
    summarize_newest_weight_update_pause,
)
from areal_hpc.recipe.sections.evaluation import AlertsConfig
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.rundir.checkpoints import RewardRange
from areal_hpc.rundir.jsonl import JsonMetricRow, append_line, read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import NO_SOURCES, TrainSources
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.trainer.batch.batch_metrics import (
    REPETITION_TAIL_TOKENS,
    EpisodeRecord,
    compute_repeated_answer_share,
    compute_repeated_ngram_fraction,
    extend_reward_range,
    group_episode_rewards,
    merge_rows_into_episode,
    summarize_episodes,
    summarize_replies,
    summarize_rewards,
)
from areal_hpc.trainer.batch.sources import summarize_sources
from areal_hpc.trainer.batch.training_rows import build_rows, measure_share_of_idle_groups
from areal_hpc.trainer.model.families.architecture import Architecture, MoeConfig
from areal_hpc.trainer.model.parameter_counts import count_model_parameters
from areal_hpc.trainer.model.utilization import count_training_flops, find_peak_flops_per_s
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.replicas import UpdatePauseStats
from areal_hpc.wire.trajectory import CallRecord, RowRecord, TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.sample_trajectories import plain_row

DEFAULT_OBJECTIVE = ObjectiveConfig()


def row(ticket: int, episode: int, reward: float, mask: str = "011") -> TrajectoryRow:
    """Make a row whose model sampled where the mask has a 1."""
    return plain_row([*map(int, mask)], ticket, episode, reward)


def groups(*rewards: list[float]) -> list[TrajectoryRow]:
    """Make a ticket for each list, with an episode for each reward."""
    return [
        row(ticket, i, value) for ticket, own in enumerate(rewards) for i, value in enumerate(own)
    ]


def summarize(
    batch: list[TrajectoryRow],
    seen: RewardRange | None = None,
    objective: ObjectiveConfig = DEFAULT_OBJECTIVE,
) -> dict[str, float]:
    grouped = group_episode_rewards(batch)
    return summarize_rewards(grouped, extend_reward_range(seen, grouped), objective)


def test_groups_that_teach_nothing_are_told_by_where_they_stand() -> None:
    metrics = summarize(groups([1, 1], [0, 0], [0, 1], [0.5, 0.5]))
    assert metrics["episodes"] == 8
    assert (metrics["groups/all_best"], metrics["groups/all_worst"]) == (0.25, 0.25)
    assert metrics["reward/mean"] == 0.5
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/std"] == pytest.approx(np.std([1, 1, 0, 0, 0, 1, 0.5, 0.5], ddof=1))
    assert metrics["reward/standard_error"] == pytest.approx(np.std([1, 0, 0.5, 0.5], ddof=1) / 2)


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


def test_each_source_has_its_share_its_rewards_and_its_idle_groups() -> None:
    batch = groups([1, 0], [1, 1], [0.5, 0.5], [0.2, 0.2])
    lines = [5, 0, 0, 1]  # of the tickets' tasks
    batch = [replace(row, record=RowRecord(task_index=lines[row.ticket_id])) for row in batch]
    built = build_rows(batch, WeightVersion(1, 0), [GenerationFork(1, 0)], DEFAULT_OBJECTIVE)
    sources = TrainSources(("sums", "absent", "words"), (2, 3, 4))
    metrics = summarize_sources(batch, built, sources)
    assert metrics == pytest.approx(
        {
            **{"groups/share/sums": 0.75, "groups/share/words": 0.25, "groups/share/absent": 0.0},
            **{"tokens/share/sums": 0.75, "tokens/share/words": 0.25, "tokens/share/absent": 0.0},
            **{"reward/mean/sums": 3.4 / 6, "reward/mean/words": 0.5},
            **{"groups/zero_variance/sums": 1.0, "groups/zero_variance/words": 0.0},
        }
    )
    assert summarize_sources(batch, built, NO_SOURCES) == {}


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
    metrics = summarize_replies(
        [row(0, 0, 1.0, "0110001"), row(0, 1, 1.0, "0111"), row(1, 0, 0, "00")]
    )
    assert metrics["reply/tokens_mean"] == 2.0
    assert metrics["reply/tokens_max"] == 3
    assert metrics["reply/tokens_p95"] == pytest.approx(2.9)
    assert summarize_replies([row(0, 0, 1.0, "00")]) == {}


def test_a_loop_at_the_end_of_a_reply_is_repetition_and_two_equal_replies_are_not() -> None:
    fresh = np.arange(600, dtype=np.int32)
    assert compute_repeated_ngram_fraction([fresh, fresh]) == 0.0
    loop = np.concatenate([fresh, np.resize(np.array([7, 8], np.int32), REPETITION_TAIL_TOKENS)])
    assert compute_repeated_ngram_fraction([loop]) == pytest.approx(1 - 2 / 253)
    assert compute_repeated_ngram_fraction([loop[:600]]) == 0.0
    assert compute_repeated_ngram_fraction([fresh[:3]]) == 0.0


def test_answers_are_compared_across_tasks_alone() -> None:
    def answer(ticket: int, episode: int, text: str) -> TrajectoryRow:
        record = RowRecord(calls=[CallRecord(id="a", reward=Reward(1.0, answer=text))])
        return replace(row(ticket, episode, 1.0, "0111"), record=record)

    same = [answer(ticket, episode, "0") for ticket in range(2) for episode in range(2)]
    assert compute_repeated_answer_share(same) == 1.0
    assert compute_repeated_answer_share([*same[:2], answer(1, 0, "4"), same[3]]) == 0.5
    assert compute_repeated_answer_share(same[:2]) == 0.0, "samples of one task"
    sampled = [row(0, 0, 1.0, "011"), row(1, 0, 1.0, "011"), row(2, 0, 1.0, "0111")]
    assert compute_repeated_answer_share(sampled) == pytest.approx(1 / 3), "without answers"


def call(name: str, begin: float, end: float, **facts: Any) -> CallRecord:
    given: dict[str, Any] = {"trained": True, "finish_reason": "stop", "prompt_tokens": 10,
                             "reply_tokens": 5}  # fmt: skip
    return CallRecord(id=name, asked_at=begin, answered_at=end, **{**given, **facts})


def episode(*calls: CallRecord, cell: str = "cell-0", begin: float = 100, end: float = 110) -> Any:
    return EpisodeRecord(cell, begin, end, {call.id: call for call in calls})


def test_turns_times_and_tools_are_those_of_the_calls() -> None:
    metrics = summarize_episodes(
        [
            episode(call("a", 100, 102), call("b", 101, 104), call("c", 108, 109)),
            episode(call("d", 100, 105, finish_reason="length", cached_tokens=8)),
        ]
    )
    assert (metrics["episode/turns_mean"], metrics["episode/turns_max"]) == (2.0, 3)
    assert (metrics["episode/duration_mean_s"], metrics["episode/duration_max_s"]) == (10.0, 10.0)
    assert metrics["episode/tool_time_fraction"] == pytest.approx(1 - (4 + 1 + 5) / 20)
    assert metrics["reply/cut_fraction"] == 0.25
    assert metrics["generation/tokens_per_s"] == pytest.approx(20 / 9)
    assert metrics["generation/cached_prompt_fraction"] == pytest.approx(8 / 40)
    assert "generation/slowest_cell_ratio" not in metrics, "there is one cell"


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
    metrics = summarize_episodes([episode(call("b", 100, 102)), slow])
    assert metrics["generation/slowest_cell_ratio"] == pytest.approx(0.25)


def test_parts_and_metrics_of_rewards_are_means_over_the_episodes_that_have_them() -> None:
    first = Reward(1.0, parts={"format": 0.2}, metrics={"tool_errors": 2})
    second = Reward(0.0, parts={"format": 0.3})
    metrics = summarize_episodes(
        [
            episode(call("a", 100, 101, reward=first), call("b", 101, 102, reward=second)),
            episode(call("c", 100, 101, reward=second)),
            episode(call("d", 100, 101)),
        ]
    )
    assert metrics["reward/part/format"] == pytest.approx((0.5 + 0.3) / 2)
    assert metrics["reward/metric/tool_errors"] == 2.0


DENSE = Architecture("qwen2", 3, 8, 4, 2, 2, 16, 100, 1e-6, 1e4, None, tied=True)
MIXTURE = Architecture(
    "qwen3_moe", 3, 8, 4, 2, 2, 16, 100, 1e-6, 1e4, None, tied=True,
    experts=MoeConfig(8, 2, 6, norm_weights=True),
)  # fmt: skip
QKV_AND_OUT = 8 * 8 + 2 * 4 * 8 + 8 * 8


def test_a_dense_network() -> None:
    weights = 3 * (QKV_AND_OUT + 3 * 8 * 16)
    attention = 3 * (4 * 2) * (5 * 5 + 7 * 7)
    expected = 3 * (2 * weights * 12 + 2 * 100 * 8 * 4 + 2 * attention)
    assert count_training_flops(DENSE, [5, 7], 4) == expected


def test_of_a_mixture_the_experts_that_a_token_visits_count() -> None:
    weights = 3 * (QKV_AND_OUT + 8 * 8 + 2 * 3 * 8 * 6)
    assert count_training_flops(MIXTURE, [1], 0) == 3 * (2 * weights + 2 * 3 * 8)
    assert MIXTURE.experts is not None
    experts = replace(MIXTURE.experts, dense_layers=1, shared_ffn=5, is_sigmoid=True)
    weights = 3 * QKV_AND_OUT + 3 * 8 * 16 + 2 * (8 * 8 + 2 * 3 * 8 * 6 + 3 * 8 * 5)
    flops = count_training_flops(replace(MIXTURE, experts=experts), [1], 0)
    assert flops == 3 * (2 * weights + 2 * 3 * 8)


def test_short_rows_of_a_known_model_take_six_operations_a_weight() -> None:
    arch = Architecture(
        "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e-6, 1e6, None, tied=False, qk_norm=True
    )
    assert count_model_parameters(arch) == 8_190_735_360  # as its authors publish
    # 8.19e9 weights, of which the embedding, 0.62e9, is looked up.
    assert count_training_flops(arch, [100], 100) == pytest.approx(6 * 7.57e9 * 100, rel=0.01)


@pytest.mark.parametrize(
    "name", ["AMD Instinct MI300X", "NVIDIA RTX A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_no_peak_is_made_up(name: str) -> None:
    assert find_peak_flops_per_s(name) is None


def write_losses(path: Path) -> MetricsWriter:
    """Write the losses of five steps, each equal to the step's number."""
    writer = MetricsWriter(path, None, 0)
    for step in range(5):
        writer.write(step, {"loss": float(step)})
    return writer


def test_steps_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_losses(path)
    resumed = MetricsWriter(path, None, 3)
    assert resumed.reopened == {"loss": 3.0}
    resumed.write(3, {**resumed.reopened, "eval/reward": 0.5})
    resumed.write(4, {"loss": 40.0})
    assert read_readable_records(path) == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 3.0, "eval/reward": 0.5},
        {"step": 4, "loss": 40.0},
    ]


def test_a_late_evaluation_belongs_to_its_own_step_and_survives_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = write_losses(path)
    assert first.judged_step == -1
    first.write(1, {"eval/reward": 0.25})
    first.write(3, {"eval/reward": 0.5})
    first.write(4, {"eval/reward": 0.75})
    assert [line["step"] for line in read_readable_records(path)] == [0, 1, 2, 3, 4, 1, 3, 4]
    expected = [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 1.0, "eval/reward": 0.25},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 3.0, "eval/reward": 0.5},
    ]
    assert read_metrics(path) == [*expected, {"step": 4, "loss": 4.0, "eval/reward": 0.75}]
    resumed = MetricsWriter(path, None, 3)
    assert resumed.judged_step == 3
    assert resumed.reopened == {"loss": 3.0, "eval/reward": 0.5}
    assert read_readable_records(path) == expected[:3]
    assert MetricsWriter(path, None, 2).judged_step == 1


def test_numbers_that_are_not_finite_are_null_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsWriter(path, tmp_path / "board", 0)
    line: JsonMetricRow = {
        "nan": math.nan,
        "inf": -math.inf,
        "loss": 1.5,
        "version": "1.2",
        "tokens": 3,
    }
    log.write(1, line)
    log.close()
    known = {"loss": 1.5, "version": "1.2", "tokens": 3}
    assert read_readable_records(path) == [{"step": 1, "nan": None, "inf": None, **known}]
    # A checkpoint carries a line in its own codec, which must be able to read it again.
    assert msgspec.json.decode(
        msgspec.json.encode(line), type=JsonMetricRow
    ) == replace_non_finite_by_none(line)


def test_lines_that_follow_a_checkpoint_wait_until_it_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsWriter(path, None, 0)
    log.write(1, {"loss": 1.0})
    log.hold_back_lines()
    log.write(2, {"loss": 2.0})
    log.write(3, {"loss": 3.0})
    assert [line["step"] for line in read_readable_records(path)] == [1]
    log.write_held_lines()
    log.write(4, {"loss": 4.0})
    assert [line["step"] for line in read_readable_records(path)] == [1, 2, 3, 4]


def test_stalls_are_those_of_the_newest_version_over_all_replicas() -> None:
    pauses = [
        UpdatePauseStats("1.9", 9.0, 8.0),
        UpdatePauseStats("1.10", 0.5, 0.1),
        UpdatePauseStats("1.10", 0.7, 0.3),
        UpdatePauseStats("", 5.0, 5.0),
    ]
    assert summarize_newest_weight_update_pause(pauses) == {
        "weights/generation_pause_version": "1.10",
        "weights/generation_pause_s": 0.7,
    }
    assert summarize_newest_weight_update_pause([]) == {}


def test_the_best_step_is_the_latest_of_the_highest_among_those_asked(tmp_path: Path) -> None:
    path, name = tmp_path / "metrics.jsonl", "evaluation/aime/pass@8"
    for step, value in ((1, 0.9), (2, 0.5), (3, 0.5), (4, None), (5, 0.2)):
        append_line(path, {"step": step, name: value})
    append_line(path, {"step": 6, "loss": 1.0})
    assert find_best_step(path, "aime/pass@8", [2, 3, 4, 5, 6]) == 3
    assert find_best_step(path, "aime/pass@8", [1, 2]) == 1
    assert find_best_step(path, "aime/pass@8", [4, 6, 7]) is None
    assert find_best_step(path, "", [1, 2]) is None


CUT = {"reply/cut_fraction": 0.5}


def start(paths: RunPaths, resume_step: int) -> tuple[MetricsWriter, AlertReporter]:
    """Make the writer and the reporter of a trainer that resumes after `resume_step`."""
    metrics = MetricsWriter(paths.metrics, None, resume_step)
    reopened: JsonMetricRow = {"step": resume_step, **metrics.reopened} if metrics.reopened else {}
    events = EventLog(paths.events, "trainer")
    return metrics, AlertReporter(AlertsConfig(), paths, events, reopened)


def train(trainer: tuple[MetricsWriter, AlertReporter], first: int, *rows: dict[str, Any]) -> None:
    metrics, reporter = trainer
    for step, row in enumerate(rows, start=first):
        metrics.write(step, {"episodes": 4, **row})
        reporter.report_new_alerts({"step": step, "episodes": 4, **row})


@pytest.mark.parametrize(
    ("before", "after"),
    [([{}, {}, CUT], [CUT, {}]), ([{}, CUT, {}], [{}, CUT]), ([CUT, {}, {}], [{}, {}, CUT])],
)
def test_a_restart_tells_no_alert_again(
    tmp_path: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    paths = RunPaths(tmp_path)
    train(start(paths, 0), 1, *before)
    assert len(read_readable_records(paths.events)) == 1
    train(start(paths, len(before)), len(before), *after)  # the step of the checkpoint comes again
    assert len(read_readable_records(paths.events)) == 1


def test_an_alert_that_begins_after_a_restart_is_told(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    train(start(paths, 0), 1, {}, {})
    train(start(paths, 2), 2, {}, CUT, CUT)
    assert [event["step"] for event in read_readable_records(paths.events)] == [3]


def test_an_evaluation_that_ends_late_is_judged_with_its_step(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    metrics, reporter = trainer = start(paths, 0)
    rising = [{"reward/mean": step / 10} for step in range(1, 9)]
    reporter.report_new_alerts({"step": 0, "evaluation/judge/avg@1": 0.2})
    train(trainer, 1, *rising)
    assert read_readable_records(paths.events) == []
    record = StepRecord(metrics, WeightVersion(1, 9), {}, reporter.report_new_alerts)
    record.add_metrics(8, {"evaluation/judge/avg@1": 0.1})
    (event,) = read_readable_records(paths.events)
    assert (event["rule"], event["step"]) == ("reward_hacking", 8)


def test_a_step_that_a_resume_opens_again_keeps_its_own_times(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", None, 0)
    old = {"time/step_s": 2.0, "time/batch_wait_s": 1.0}
    record = StepRecord(metrics, WeightVersion(2, 5), dict(old))
    record.timer.add_seconds("cell_wait", 52.0)  # SGLang's start in the new launch
    record.write_row_once({})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert {name: value for name, value in row.items() if name.startswith("time/")} == old
    assert row["limit"] == "generation"
