"""Live progress: plain lines, and on a terminal a live line below them."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_hpc.dataset.sources import count_materialized_rows
from areal_hpc.errors import escape_controls
from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS, split_ticket_id
from areal_hpc.metrics.alerts import Alert, AlertTracker
from areal_hpc.metrics.step_line import (
    draw_sparkline,
    estimate_remaining_s,
    format_step_line,
    format_step_number,
    list_step_figures,
)
from areal_hpc.metrics.step_metrics import list_evaluated_sets, select_evaluation_metrics
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir.manifests import read_evaluated_tickets
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import get_recipe_value
from areal_hpc.rundir.telemetry.events import EventFollower
from areal_hpc.view.events import NewEventLineFormatter, RunPhaseTracker
from areal_hpc.view.formatting import format_duration, list_numbers
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.state.summary import format_alert

MAX_SFT_LINES = 10
REFRESH_S = 1.0
MAX_SILENCE_S = 60.0
N_EVALUATION_LINES = 10
MAX_EVALUATION_SILENCE_S = 30.0
MAX_EARLIER_STEPS = 10
"""Steps that a reporter shows of those before it."""
MAX_SHOWN_ALERTS = 4
MAX_SPARKLINE_STEPS = 24
WATCH_POLL_S = 0.5
STATE_POLL_S = 15.0


class PlainReporter:
    """Reporter in plain lines. With `joins_run` it also shows what the run did before."""

    def __init__(
        self,
        paths: RunPaths,
        total_steps: int,
        sft_steps: int,
        console: Console | None = None,
        *,
        joins_run: bool = False,
    ) -> None:
        self._paths = paths
        self._total_steps = total_steps
        self._sft_steps = sft_steps
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._view = RunView(paths)
        shown = MAX_EARLIER_STEPS if joins_run else 0
        self._last_step = _get_last_step(self._view.steps[: max(0, len(self._view.steps) - shown)])
        self._last_sft = max(0, _get_last_step(self._view.sft))
        self._evaluated = _list_evaluated_steps(self._view.steps)
        self._alerts: AlertTracker | None = None
        self._refreshed_at = 0.0
        self._events = EventFollower(paths.events)
        self._news = NewEventLineFormatter()
        self._phase = RunPhaseTracker.from_events(self._view.events if joins_run else ())
        self._printed_at = time.monotonic()
        self._shown_phase = ""
        self._has_trained = False

    def print_line(self, message: str) -> None:
        self._printed_at = time.monotonic()
        # Messages may hold brackets of any kind, `file.py:100:`, and replies of a model.
        self._console.print(escape_controls(message), markup=False, emoji=False)

    def show_progress(self, stage: str) -> None:
        """Show news of a stage: events at once, steps about once a second."""
        self.report_new_events()
        if time.monotonic() - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = time.monotonic()
            self._refresh(stage)

    def _refresh(self, stage: str) -> None:
        """Print new steps, and the phase if it changes before the first step or after a silence."""
        self.report_new_steps()
        phase = self._describe_phase(stage)
        kind = phase.partition(":")[0].partition(",")[0]
        has_changed = kind != self._shown_phase and not self._has_trained
        if phase and (has_changed or time.monotonic() - self._printed_at >= MAX_SILENCE_S):
            self._shown_phase = kind
            self.print_line(f"phase    {phase}")

    def _describe_phase(self, stage: str) -> str:
        if stage == "train":
            return self._phase.describe(self._view.ledger)
        if not (rows := self._view.sft):
            return "SFT: no step yet" if stage == "sft" else ""  # a replay has no such stage
        return f"SFT: {', '.join(self._list_figures(rows, self._sft_steps))}"

    def report_new_events(self) -> None:
        for event in self._events.read_new_events():
            self._phase.add_event(event)
            for line in self._news.describe_news(event):
                self.print_line(line)

    def report_new_steps(self) -> None:
        self._view.look_again()
        steps, sft = self._view.steps, self._view.sft
        # Both go back when a run starts over or resumes from a checkpoint.
        self._last_step = min(self._last_step, _get_last_step(steps))
        self._last_sft = max(0, min(self._last_sft, _get_last_step(sft)))
        for row in sft:
            silent_steps = 1 if "eval/loss" in row else self._sft_steps / MAX_SFT_LINES
            if row["step"] >= self._last_sft + silent_steps:
                self._last_sft = row["step"]
                self.print_line(f"SFT {format_step_line(row, self._sft_steps)}")
        for number, row in enumerate(steps):
            if row["step"] > self._last_step:
                self._last_step = row["step"]
                self._has_trained = self._has_trained or row["step"] > 0
                self._print_step(steps[: number + 1])
                if self._alerts is None:  # the recipe is there once a step is
                    self._alerts = AlertTracker(self._view.alerts_off)
                    self._alerts.take_new_alerts(steps[:number])
                for alert in self._alerts.take_new_alerts(steps[: number + 1]):
                    self._report_alert(alert)
            elif list_evaluated_sets(row) and row["step"] not in self._evaluated:
                evaluation = {"step": row["step"], **select_evaluation_metrics(row)}
                self.print_line(format_step_line(evaluation, self._total_steps))
        self._evaluated = _list_evaluated_steps(steps)

    def _print_step(self, rows: Sequence[dict[str, Any]]) -> None:
        number = format_step_number(rows[-1], self._total_steps)
        self.print_line("  ".join((number, *self._list_figures(rows, self._total_steps))))

    def _list_figures(self, rows: Sequence[dict[str, Any]], total: int) -> list[str]:
        left_s = estimate_remaining_s(rows, total)
        left = [f"{format_duration(left_s)} left"] if left_s else []
        return [*list_step_figures(rows[-1]), *left]

    def _report_alert(self, alert: Alert) -> None:
        self.print_line(format_alert(alert))

    def close(self) -> None:
        self.report_new_events()
        self.report_new_steps()


class EvaluationReporter(PlainReporter):
    def __init__(self, paths: RunPaths, sets: Sequence[EvaluationSet]) -> None:
        super().__init__(paths, total_steps=1, sft_steps=0)
        self._sets = sets
        self._n_tasks: int | None = None
        self._set_numbers = {item.number for item in sets}
        self._done = -1
        self._done_at = time.monotonic()

    def _count_tasks(self) -> int:
        """Count the tasks to play, at most the recipe's bounds; the bounds until all sets exist."""
        if self._n_tasks is None:
            files = [self._paths.evaluation_tasks(item.name) for item in self._sets]
            if not all(file.exists() for file in files):
                return sum(item.tasks for item in self._sets)
            self._n_tasks = sum(
                min(item.tasks, count_materialized_rows(file))
                for item, file in zip(self._sets, files, strict=True)
            )
        return self._n_tasks

    def _refresh(self, stage: str) -> None:
        tickets = read_evaluated_tickets(self._paths, STEP_OF_LOADED_WEIGHTS)
        done = sum(split_ticket_id(ticket.ticket_id)[0] in self._set_numbers for ticket in tickets)
        is_late = time.monotonic() - self._done_at >= MAX_EVALUATION_SILENCE_S and done > self._done
        total = self._count_tasks()
        if self._done < 0 or done >= self._done + max(1, total // N_EVALUATION_LINES) or is_late:
            self._done, self._done_at = done, time.monotonic()
            self.print_line(f"tasks    {done}/{total}")


class LiveReporter(PlainReporter):
    """Reporter on a terminal: a line for each step, a live line, and below it what is amiss."""

    def __init__(
        self, paths: RunPaths, total_steps: int, sft_steps: int, *, joins_run: bool = False
    ) -> None:
        console = Console(highlight=False)
        super().__init__(paths, total_steps, sft_steps, console, joins_run=joins_run)
        self._new_alerts: list[Alert] = []
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def _print_step(self, rows: Sequence[dict[str, Any]]) -> None:
        number = format_step_number(rows[-1], self._total_steps)
        figures = self._list_figures(rows, self._total_steps)
        # Not arguments of `print`, which would apply to the live line, too, and change its height.
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(number, style="bold")
        line.append("".join(f"  {figure}" for figure in figures[:1]))  # none before any training
        if "reward/mean" in rows[-1] and not self._console.options.ascii_only:
            free = self._console.width - cell_len("  ".join((number, *figures, "")))
            width = max(0, min(free, self._total_steps, MAX_SPARKLINE_STEPS))
            curve = draw_sparkline(list_numbers(rows, "reward/mean"), width)
            line.append(f" {curve.ljust(width)}", style="cyan")
        line.append("".join(f"  {figure}" for figure in figures[1:]))
        self._console.print(line)

    def _report_alert(self, alert: Alert) -> None:
        self._new_alerts.append(alert)

    def _refresh(self, stage: str) -> None:
        self.report_new_steps()
        rows, total = self._view.steps, self._total_steps
        if stage == "sft":
            rows, total = self._view.sft, self._sft_steps
        done = rows[-1]["step"] if rows else 0
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(width=16)
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        line.add_row(
            Text(f"step {done}/{total}", style="bold"),
            ProgressBar(total=total, completed=done),
            Text(escape_controls(self._describe_phase(stage))),
        )
        alerts = self._view.alerts[:MAX_SHOWN_ALERTS]
        styles = {"failure": "bold red", "note": "yellow"}
        notes = [Text(format_alert(alert), style=styles[alert.level]) for alert in alerts]
        self._live.update(Group(line, *notes))

    def close(self) -> None:
        """Print what is new since the last refresh and all alerts, and remove the live line."""
        try:
            super().close()
            for alert in self._new_alerts:
                super()._report_alert(alert)
        finally:  # else the terminal stays without a cursor
            self._live.stop()


@contextmanager
def open_progress_reporter(
    paths: RunPaths, total_steps: int, sft_steps: int, *, joins_run: bool = False
) -> Iterator[PlainReporter]:
    """Open a reporter of a run's progress, and close it when the context ends."""
    is_live = sys.stdout.isatty() and not Console().is_dumb_terminal
    reporter_class = LiveReporter if is_live else PlainReporter
    reporter = reporter_class(paths, total_steps, sft_steps, joins_run=joins_run)
    try:
        yield reporter
    finally:
        reporter.close()


def watch_run(paths: RunPaths, stop: threading.Event) -> None:
    """Show the progress of a run that another process started, until it is over or `stop`."""
    view = RunView(paths)
    sft_steps = int(get_recipe_value(view.recipe, "sft.total_steps") or 0)
    with open_progress_reporter(paths, view.total_steps, sft_steps, joins_run=True) as reporter:
        while view.state.startswith(("running", "waiting", "ending", "unknown", "being")):
            looked_at = time.monotonic()
            while time.monotonic() < looked_at + STATE_POLL_S:
                is_sft = sft_steps and not paths.sft_export.exists()
                reporter.show_progress("sft" if is_sft else "train")
                if paths.finished_marker.exists() or stop.wait(WATCH_POLL_S):
                    return
            view.look_again()


def _get_last_step(rows: Sequence[dict[str, Any]]) -> int:
    return int(rows[-1]["step"]) if rows else -1


def _list_evaluated_steps(rows: Sequence[dict[str, Any]]) -> set[int]:
    return {row["step"] for row in rows if list_evaluated_sets(row)}
