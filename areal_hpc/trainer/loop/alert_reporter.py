"""Alerts as the trainer tells them: events, its log, and a program of the user's."""

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from typing import Any

from areal_hpc.metrics.alerts import (
    ALERT_WINDOW_ROWS,
    STEPS_BEFORE_REPEATED_ALERT,
    Alert,
    AlertTracker,
)
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.recipe.sections.alerts import AlertsConfig
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventLog

logger = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 60.0
"""A program that has not ended by then is killed."""
ALERT_EVENT = "alert"
VARIABLE_PREFIX = "AREAL_HPC_ALERT_"
"""Of the program's environment variables: RULE, LEVEL, STEP, MESSAGE, HINT and RUN_DIR."""


class AlertReporter:
    """Judges the run after each step, and tells every alert once.

    Alerts that the run had before this start of the trainer are not told again. `reopened` is a
    row that was told of then and will be reported once more.
    """

    def __init__(
        self,
        config: AlertsConfig,
        paths: RunPaths,
        events: EventLog,
        reopened: JsonMetricRow | None = None,
    ) -> None:
        self._command = list(config.command)
        self._run_dir = str(paths.root)
        self._events = events
        self._rows: deque[dict[str, Any]] = deque(
            read_metrics(paths.metrics), maxlen=ALERT_WINDOW_ROWS
        )
        self._tracker = AlertTracker(config.off)
        known: list[JsonMetricRow] = [*self._rows, *([reopened] if reopened else [])]
        for judged in range(max(0, len(known) - STEPS_BEFORE_REPEATED_ALERT), len(known)):
            self._tracker.take_new_alerts(known[: judged + 1])

    def report_new_alerts(self, row: JsonMetricRow) -> None:
        """Judge the run by another row of metrics, that of its newest step."""
        self._rows.append(row)
        for alert in self._tracker.take_new_alerts([*self._rows]):
            logger.warning("alert: %s at step %d: %s", alert.level, alert.step, alert.message)
            self._events.record(ALERT_EVENT, **dataclasses.asdict(alert))
            if self._command:
                self._start_command(alert)

    def _start_command(self, alert: Alert) -> None:
        facts = {**dataclasses.asdict(alert), "run_dir": self._run_dir}
        variables = {f"{VARIABLE_PREFIX}{name.upper()}": str(fact) for name, fact in facts.items()}
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                start_new_session=True,
            )
        except OSError as error:
            logger.error("alerts.command: %s cannot be started: %s", self._command[0], error)
            return
        threading.Thread(target=_await_command_and_log_failure, args=[process], daemon=True).start()


def _await_command_and_log_failure(process: subprocess.Popen[bytes]) -> None:
    try:
        said, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.error("alerts.command: killed after %.0f s", COMMAND_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return
    if process.returncode:
        text = said.decode(errors="replace").strip()[-500:]
        logger.error("alerts.command: it ended with exit code %d: %s", process.returncode, text)
