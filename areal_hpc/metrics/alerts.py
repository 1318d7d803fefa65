"""Alerts of a run as of its newest step, and which of them are new. Pure."""

from collections.abc import Sequence

from areal_hpc.metrics.alert_rules import RULES, Alert, AlertLevel, TrainedStepRow
from areal_hpc.recipe.sections.alerts import AlertsConfig

MIN_ALERT_WINDOW_ROWS = 200
"""The newest rows that are looked at: cheap after each step, and enough unless a rule asks for more
steps in a row."""
STEPS_BEFORE_REPEATED_ALERT = 10


def get_alert_window_rows(config: AlertsConfig) -> int:
    return max(MIN_ALERT_WINDOW_ROWS, config.no_signal_steps or 0)


def find_alerts(rows: Sequence[TrainedStepRow], config: AlertsConfig) -> list[Alert]:
    trained = [row for row in rows[-get_alert_window_rows(config) :] if row.get("episodes")]
    if not trained:
        return []
    found = [alert for rule in RULES if (alert := rule.check(trained, config)) is not None]
    return sorted(found, key=lambda alert: alert.level != "failure")


class AlertTracker:
    def __init__(self, config: AlertsConfig) -> None:
        self._config = config
        self._last_step: dict[tuple[str, AlertLevel], int] = {}

    def take_new_alerts(self, rows: Sequence[TrainedStepRow]) -> list[Alert]:
        new = []
        for alert in find_alerts(rows, self._config):
            key, step = (alert.rule, alert.level), int(rows[-1]["step"])
            if (
                key not in self._last_step
                or step - self._last_step[key] > STEPS_BEFORE_REPEATED_ALERT
            ):
                new.append(alert)
            self._last_step[key] = step
        return new
