"""The metrics of a real quick start, as it was recorded: no failure at any of its steps."""

from areal_hpc.metrics.alerts import find_alerts
from areal_hpc.metrics.step_metrics import compute_time_shares_by_system_part, read_metrics
from tests.support.environments import CHECKOUT

ROWS = read_metrics(CHECKOUT / "tests" / "samples" / "quickstart_metrics.jsonl")


def test_the_quick_start_raises_no_failure_at_any_step() -> None:
    assert len(ROWS) == 26
    assert ROWS[-1]["reward/mean"] > 0.9, "it learned"
    found = [find_alerts(ROWS[:count]) for count in range(1, len(ROWS) + 1)]
    assert {alert.rule for alerts in found for alert in alerts} == {"low_entropy"}
    assert {alert.level for alerts in found for alert in alerts} == {"note"}


def test_its_phases_cover_its_steps() -> None:
    assert min(sum(compute_time_shares_by_system_part(row).values()) for row in ROWS) >= 0.97
