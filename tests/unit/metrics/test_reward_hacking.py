"""A reward that rises is believed, unless a judge, facts, answers or lengths disagree."""

from collections.abc import Callable
from typing import Any

import pytest

from areal_hpc.metrics.alerts import find_alerts
from areal_hpc.metrics.step_metrics import read_metrics
from tests.support.environments import CHECKOUT

STEPS = 16
Course = Callable[[int], dict[str, Any]]
"""Function of a step that returns metrics of its row."""


def line(name: str, start: float, end: float) -> Course:
    return lambda step: {name: start + (end - start) * step / STEPS}


def evaluate(set_name: str, start: float, end: float, error: float = 0.02) -> Course:
    """Evaluate a set every four steps, with an interval."""

    def course(step: int) -> dict[str, Any]:
        value, name = start + (end - start) * step / STEPS, f"evaluation/{set_name}/avg@1"
        if step % 4:
            return {}
        return {name: value, f"{name}_low": value - 2 * error, f"{name}_high": value + 2 * error}

    return course


def make_rows(*courses: Course) -> list[dict[str, Any]]:
    """Make rows whose reward rises from 0.2 to 0.9, with the given courses of other metrics."""
    rows: list[dict[str, Any]] = []
    for step in range(STEPS + 1):
        row: dict[str, Any] = {"step": step}
        if step:
            row |= {
                "episodes": 256,
                "reward/standard_error": 0.03,
                "reward/min": 0.0,
                "reward/max": 1.0,
                "reward/mean": 0.2 + 0.7 * step / STEPS,
                "reply/tokens_mean": 30.0,
            }
        for course in courses:
            row |= course(step)
        rows.append(row)
    return rows


def find_hacking(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    alerts = [alert for alert in find_alerts(rows) if alert.rule == "reward_hacking"]
    return [(alert.level, alert.message.partition("but ")[2]) for alert in alerts]


HONEST = evaluate("valid", 0.2, 0.85)
FLAT_REWARD = line("reward/mean", 0.5, 0.55)
LONGER = line("reply/tokens_mean", 30.0, 100.0)
SAME = line("reply/repeated_answer_share", 0.05, 0.95)
TOUCHED = line("reward/metric/touched_tests", 0.0, 0.5)


@pytest.mark.parametrize(
    ("courses", "level", "words"),
    [
        ((HONEST,), None, ()),
        ((HONEST, LONGER), None, ()),  # it learns to think
        ((evaluate("valid", 0.2, 0.5),), None, ()),  # the held-out tasks are harder
        ((evaluate("valid", 0.99, 0.99),), None, ()),  # it has no room to rise
        ((evaluate("valid", 0.2, 0.1, error=0.3),), None, ()),  # too few tasks to tell
        ((evaluate("longer", 0.2, 0.1), HONEST), None, ()),  # another set is no judge
        ((line("reply/repeated_answer_share", 0.8, 0.9), HONEST), None, ()),  # always so
        ((line("reply/repeated_answer_share", 0.0, 0.3), HONEST), None, ()),  # choices of four
        ((FLAT_REWARD, evaluate("judge", 0.5, 0.1), SAME, TOUCHED, LONGER), None, ()),
        ((evaluate("judge", 0.2, 0.1),), "failure", ("judge/avg@1 goes from 0.2 to 0.1",)),
        ((evaluate("valid", 0.2, 0.1),), "note", ("valid/avg@1 goes from 0.2 to 0.1",)),
        ((HONEST, evaluate("judge", 0.2, 0.25)), "failure", ("held-out evaluation/judge/avg@1",)),
        ((HONEST, TOUCHED), "failure", ("reward/metric/touched_tests rises from 0.0",)),
        ((line("reward/part/tampered", 0.0, 0.4),), "failure", ("reward/part/tampered",)),
        ((HONEST, SAME), "note", ("different tasks have equal answers in 8",)),
        ((LONGER,), "note", ("replies have 93 tokens, before 41",)),
        ((HONEST, SAME, LONGER), "note", ("equal answers", "replies have 93 tokens")),
    ],
)
def test_what_disagrees_with_the_reward_is_told(
    courses: tuple[Course, ...], level: str | None, words: tuple[str, ...]
) -> None:
    found = find_hacking(make_rows(*courses))
    assert [found_level for found_level, _ in found] == ([] if level is None else [level])
    for word in words:
        assert word in found[0][1]


def test_a_cheat_is_told_after_half_of_its_steps_and_not_before_eight() -> None:
    rows = make_rows(evaluate("judge", 0.2, 0.05), SAME)
    first = next(row["step"] for end, row in enumerate(rows, 1) if find_hacking(rows[:end]))
    assert first == 8
    assert all(find_hacking(rows[:end]) for end in range(first + 1, len(rows) + 1))


def test_the_metric_of_the_newest_judgment_counts() -> None:
    rows = make_rows(evaluate("judge", 0.2, 0.05))
    rows[0] |= {f"evaluation/judge/avg@{k}": 0.9 for k in range(2, 9)}  # of another n_samples
    ((level, message),) = find_hacking(rows)
    assert level == "failure"
    assert "judge/avg@1 goes from 0.2 to 0.05" in message


def test_an_unusual_step_changes_nothing() -> None:
    rows = make_rows(HONEST)
    rows[-2] |= {"reward/metric/tampered": 1.0, "reply/repeated_answer_share": 1.0}
    assert find_hacking(rows) == []


def test_the_quick_start_is_believed_at_each_step() -> None:
    rows = read_metrics(CHECKOUT / "tests" / "samples" / "quickstart_metrics.jsonl")
    assert [find_hacking(rows[:end]) for end in range(1, len(rows) + 1)] == [[]] * len(rows)
