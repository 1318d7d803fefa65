"""Alert rules name rows that break them and no others; failed tries are counted."""

from pathlib import Path
from typing import Any, get_args

import pytest

from areal_hpc.metrics.alerts import (
    RULES,
    STEPS_BEFORE_REPEATED_ALERT,
    Alert,
    AlertTracker,
    find_alerts,
)
from areal_hpc.metrics.step_metrics import (
    EpisodeFailureCounter,
    FailureCounts,
    compute_time_shares_by_system_part,
    read_metrics,
)
from areal_hpc.recipe.sections.evaluation import AlertName
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.view.state.run_view import find_early_alert
from tests.support.environments import CHECKOUT

HEALTHY = {
    "episodes": 256,
    "groups": 32,
    "reward/mean": 0.5,
    "reward/standard_error": 0.02,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "grad_norm": 1.0,
    "groups/zero_variance": 0.2,
    "groups/all_best": 0.1,
    "groups/all_worst": 0.1,
    "entropy/mean": 0.8,
    "reply/tokens_mean": 30.0,
    "reply/cut_fraction": 0.0,
    "reply/repeated_fraction": 0.1,
    "logprob/compared_tokens": 1000,
    "logprob/engine_trainer_mean_abs_diff": 1e-3,
    "episode/failures": 0,
    "disk/free_bytes": 100 * 2**30,
    "generation/slowest_cell_ratio": 0.9,
}
EQUAL = {"groups/zero_variance": 0.95, "grad_norm": 0.1}
SOLVED = {**EQUAL, "groups/all_best": 0.94, "groups/all_worst": 0.0}
NO_GRADIENT = {"grad_norm": 0.0}
LEARNING_CRITIC = {"critic/grad_norm": 0.3, "groups/zero_variance": 0.0}
CONSTANT = {
    **NO_GRADIENT, "groups/zero_variance": 1.0, "groups/all_best": 0.0, "groups/all_worst": 0.0,
    "reward/mean": 0.0, "reward/max": 0.0, "reward/standard_error": 0.0,
}  # fmt: skip


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**HEALTHY, "step": step, **change} for step, change in enumerate(changes, start=1)]


def rewards(*means: float, **more: Any) -> list[dict[str, Any]]:
    return rows(*({"reward/mean": mean, **more} for mean in means))


def facts(alerts: list[Alert]) -> list[tuple[str, str, int]]:
    return [(alert.rule, alert.level, alert.step) for alert in alerts]


def test_each_rule_is_in_the_documents_and_a_recipe_can_switch_it_off() -> None:
    assert set(get_args(AlertName)) == {rule.name for rule in RULES}
    document = (CHECKOUT / "docs" / "metrics.md").read_text()
    assert all(f"| `{rule.name}` | {rule.level} |" in document for rule in RULES)


def test_a_healthy_run_raises_nothing() -> None:
    assert find_alerts(rows(*[{}] * 30)) == []
    assert find_alerts([]) == []
    assert find_alerts([{"step": 0, "eval/reward": 0.2}]) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([CONSTANT] * 2, []),
        ([CONSTANT] * 3, [("no_signal", "failure", 1)]),
        ([{}, EQUAL, NO_GRADIENT, EQUAL], [("no_signal", "failure", 2)]),
        ([EQUAL, EQUAL, {}], []),
        ([{}] + [SOLVED] * 3, [("no_signal", "note", 2)]),
        ([SOLVED, SOLVED, EQUAL], [("no_signal", "failure", 1)]),
        ([{**EQUAL, **LEARNING_CRITIC}] * 3, []),
        ([{**EQUAL, "groups/zero_variance": 0.0, "reward/std": 0.0}] * 3, []),  # credit by turn
        ([{**NO_GRADIENT, **LEARNING_CRITIC}] * 3, []),  # it warms up
        ([{**NO_GRADIENT, "critic/grad_norm": 0.0}] * 3, [("no_signal", "failure", 1)]),
    ],
)
def test_three_steps_that_teach_nothing_are_a_failure_unless_the_tasks_are_solved(
    changes: list[dict[str, Any]], expected: list[tuple[str, str, int]]
) -> None:
    assert facts(find_alerts(rows(*changes))) == expected


def test_a_reward_that_falls_and_stays_low_is_a_failure_from_the_step_of_the_fall() -> None:
    fallen = rewards(*[0.5] * 10, 0.1, 0.12, 0.1)
    assert facts(find_alerts(fallen)) == [("reward_drop", "failure", 11)]
    assert find_alerts(rewards(*[0.5] * 10, 0.1, 0.45)) == [], "it has recovered"
    assert find_alerts(rewards(*[0.5] * 10, 0.47)) == [], "within what a step can tell"
    # After one step, if its groups make it certain enough.
    assert facts(find_alerts(rewards(0.31, 0.0))) == [("reward_drop", "failure", 2)]
    unsure = {"reward/standard_error": 0.1}
    assert find_alerts(rewards(0.31, 0.0, **unsure)) == []
    # Long after the fall the steps before are low as well, and the alert remains.
    assert facts(find_alerts(rewards(*[0.5] * 10, *[0.1] * 60))) == [("reward_drop", "failure", 11)]


def test_a_policy_that_has_solved_its_tasks_need_not_explore() -> None:
    low = {"entropy/mean": 0.01}
    assert facts(find_alerts(rows({}, low))) == [("low_entropy", "note", 2)]
    assert find_alerts(rows({}, {**low, "groups/all_best": 0.6})) == []


def test_a_noisy_reward_and_one_that_hardly_moves_are_none() -> None:
    noisy = rewards(*[0.3, 0.7] * 12, 0.1)
    assert find_alerts(noisy) == []
    converged = rewards(*[1.0] * 20, 0.95, **{"reward/standard_error": 0.0})
    assert find_alerts(converged) == [], "less than a tenth of the range of rewards"


@pytest.mark.parametrize(
    ("change", "rule", "level"),
    [
        ({"logprob/engine_trainer_mean_abs_diff": 0.2}, "engine_mismatch", "failure"),
        ({"logprob/engine_trainer_mean_abs_diff": None}, "engine_mismatch", "failure"),
        ({"episode/failures": 300}, "failing_agents", "failure"),
        ({"entropy/mean": 0.01}, "low_entropy", "note"),
        ({"reply/tokens_mean": 61.0}, "reply_length", "note"),
        ({"reply/tokens_mean": 14.0}, "reply_length", "note"),
        ({"reply/repeated_fraction": 0.6}, "repetition", "note"),
        ({"reply/cut_fraction": 0.3}, "cut_replies", "note"),
        ({"disk/free_bytes": 2**30}, "full_disk", "note"),
        ({"generation/slowest_cell_ratio": 0.3}, "slow_cell", "note"),
    ],
)
def test_a_broken_bound_is_told_unless_off(change: dict[str, Any], rule: str, level: str) -> None:
    history = rows(*[{}] * 9, change)
    assert facts(find_alerts(history)) == [(rule, level, 10)]
    assert find_alerts(history, [rule]) == []
    (name,) = change
    assert find_alerts(rows(*[{}] * 9, {name: HEALTHY[name]})) == []
    absent = [{key: value for key, value in row.items() if key != name} for row in history]
    assert find_alerts(absent) == [], "an older run's rows know nothing of it"


def test_episodes_that_ended_well_in_tickets_that_were_not_trained_count_as_well() -> None:
    failures = {"episode/failures": 300}
    for kind in ("filtered", "stale_dropped"):
        assert find_alerts(rows({**failures, f"tickets/{kind}": 16})) == []
    (alert,) = find_alerts(rows({**failures, "tickets/filtered": 4, "tickets/failed": 99}))
    assert alert.message.startswith("300 tries of episodes failed, 288 ended well: 51% failed")


def test_failures_that_earn_a_reward_are_no_good_ends_of_the_batch() -> None:
    worse = {"episode/failures": 154, "episode/rewarded_failures": 154}
    (alert,) = find_alerts(rows(worse))
    assert alert.message.startswith("154 tries of episodes failed, 102 ended well: 60% failed")
    better = {"episode/failures": 115, "episode/rewarded_failures": 115}
    assert find_alerts(rows(better)) == []
    # Of pairs, 45 % of whose episodes fail, a fifth are dropped with nothing but failures.
    pairs = {"episodes": 160, "groups": 80, "tickets/failed": 20,
             "episode/failures": 90, "episode/rewarded_failures": 90}  # fmt: skip
    assert find_alerts(rows(pairs)) == []


def test_batches_that_were_not_trained_are_passed_over() -> None:
    history = rows(CONSTANT, CONSTANT, {"episodes": 0}, CONSTANT)
    assert facts(find_alerts(history)) == [("no_signal", "failure", 1)]


def test_an_alert_is_told_when_it_begins_and_again_after_a_long_silence() -> None:
    tracker, history, alerts = AlertTracker(), [], []
    cut = {"reply/cut_fraction": 0.5}
    pattern = [{}, cut, cut, {}, cut, *[{}] * (STEPS_BEFORE_REPEATED_ALERT + 1), cut]
    for row in rows(*pattern):
        history.append(row)
        alerts += [(row["step"], alert.rule) for alert in tracker.take_new_alerts(history)]
    assert alerts == [(2, "cut_replies"), (len(pattern), "cut_replies")]


def failure(event: str = "episode_failed", **facts: Any) -> dict[str, Any]:
    return {"time": 1.0, "role": "driver-cell-0", "event": event, "eval_step": -1, **facts}


def test_new_failures_of_training_episodes_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, failure())
    counter = EpisodeFailureCounter(path)
    assert counter.count_new_failed_tries() == FailureCounts(), "what was there before is no news"
    earning = failure("episode_timed_out", reward=-0.5)
    for event in (failure(), earning, failure("episode_unserved"), failure(eval_step=5),
                  {"event": "alert"}):  # fmt: skip
        append_line(path, event)
    assert counter.count_new_failed_tries() == FailureCounts(failed_tries=2, rewarded=1)
    assert counter.count_new_failed_tries() == FailureCounts()


def test_a_line_in_the_writing_is_counted_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    counter = EpisodeFailureCounter(path)
    assert counter.count_new_failed_tries().failed_tries == 0, "there is no log yet"
    append_line(path, failure())
    content = path.read_bytes()
    path.write_bytes(content + content[:30])
    assert counter.count_new_failed_tries().failed_tries == 1
    path.write_bytes(content + content)
    assert counter.count_new_failed_tries().failed_tries == 1


def test_good_held_out_episodes_do_not_hide_that_all_training_episodes_fail() -> None:
    all_of_training = [failure(failed=n, ended=256 + n) for n in range(1, 13)]
    alert = find_early_alert(all_of_training)
    assert alert is not None
    assert alert.message.startswith("12 tries of episodes failed")
    counted = {"event": "episodes_counted", "role": "driver-cell-0", "failed": 12, "ended": 900}
    assert find_early_alert([*all_of_training, counted]) is None


ROWS = read_metrics(CHECKOUT / "tests" / "samples" / "quickstart_metrics.jsonl")


def test_the_quick_start_raises_no_failure_at_any_step() -> None:
    assert len(ROWS) == 26
    assert ROWS[-1]["reward/mean"] > 0.9, "it learned"
    by_step = [find_alerts(ROWS[:count]) for count in range(1, len(ROWS) + 1)]
    assert {alert.rule for alerts in by_step for alert in alerts} == {"low_entropy"}
    assert {alert.level for alerts in by_step for alert in alerts} == {"note"}


def test_its_phases_cover_its_steps() -> None:
    assert min(sum(compute_time_shares_by_system_part(row).values()) for row in ROWS) >= 0.97
