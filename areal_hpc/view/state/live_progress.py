"""Live progress: a terminal panel or plain lines."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_hpc.dataset.sources import count_materialized_rows
from areal_hpc.errors import escape_controls
from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS, split_ticket_id
from areal_hpc.metrics.alerts import AlertTracker
from areal_hpc.metrics.step_line import estimate_remaining_s, format_metric, format_step_line
from areal_hpc.metrics.step_metrics import list_evaluated_sets, select_evaluation_metrics
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir.manifests import read_evaluated_tickets
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import EventFollower
from areal_hpc.view.events import NewEventLineFormatter, RunPhaseTracker
from areal_hpc.view.formatting import format_duration
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.state.summary import format_alert
from areal_hpc.wire.ledger import LedgerStatus

MAX_SFT_LINES = 10
REFRESH_S = 1.0
MAX_SILENCE_S = 60.0
N_EVALUATION_LINES = 10
MAX_EVALUATION_SILENCE_S = 30.0


class PlainReporter:
    def __init__(
        self, paths: RunPaths, total_steps: int, sft_steps: int, console: Console | None = None
    ) -> None:
        self._paths = paths
        self._total_steps = total_steps
        self._sft_steps = sft_steps
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._view = RunView(paths)
        self._last_step = _get_last_step(self._view.steps)
        self._last_sft = _get_last_step(self._view.sft)
        self._evaluated = _list_evaluated_steps(self._view.steps)
        self._alerts: AlertTracker | None = None
        self._refreshed_at = 0.0
        self._events = EventFollower(paths.events)
        self._news, self._phase = NewEventLineFormatter(), RunPhaseTracker()
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
        step = max(0, _get_last_step(self._view.sft))
        return f"supervised fine-tuning: step {step} of {self._sft_steps}"

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
        self._last_sft = min(self._last_sft, _get_last_step(sft))
        for row in sft:
            if row["step"] >= self._last_sft + self._sft_steps / MAX_SFT_LINES:
                self._last_sft = row["step"]
                loss = format_metric(row["loss"], ".4f")
                self.print_line(f"SFT      {row['step']:>5}/{self._sft_steps}  loss {loss}")
        for number, row in enumerate(steps):
            if row["step"] > self._last_step:
                self._last_step = row["step"]
                self._has_trained = self._has_trained or row["step"] > 0
                self.print_line(self._format_step(steps[: number + 1]))
                if self._alerts is None:  # the recipe is there once a step is
                    self._alerts = AlertTracker(self._view.alerts_off)
                    self._alerts.take_new_alerts(steps[:number])
                for alert in self._alerts.take_new_alerts(steps[: number + 1]):
                    self.print_line(format_alert(alert))
            elif list_evaluated_sets(row) and row["step"] not in self._evaluated:
                evaluation = {"step": row["step"], **select_evaluation_metrics(row)}
                self.print_line(format_step_line(evaluation, self._total_steps))
        self._evaluated = _list_evaluated_steps(steps)

    def _format_step(self, rows: Sequence[dict[str, Any]]) -> str:
        line = format_step_line(rows[-1], self._total_steps)
        left_s = estimate_remaining_s(rows, self._total_steps)
        return f"{line}  about {format_duration(left_s)} left" if left_s else line

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
    def __init__(self, paths: RunPaths, total_steps: int, sft_steps: int) -> None:
        self._live = Live(console=Console(highlight=False), refresh_per_second=4, transient=True)
        super().__init__(paths, total_steps, sft_steps, self._live.console)
        self._live.start()
        self._began_at = time.monotonic()

    def _refresh(self, stage: str) -> None:
        self.report_new_steps()
        rows, total = self._view.steps, self._total_steps
        if stage == "sft":
            rows, total = self._view.sft, self._sft_steps
        done = rows[-1]["step"] if rows else 0
        # Steps of an earlier launch do not show how long this one takes to start.
        left_s = estimate_remaining_s(rows, total) if stage == "sft" or self._has_trained else None
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(stage, style="bold"),
            ProgressBar(total=total, completed=done, width=40),
            f"step {done}/{total}",
            format_duration(time.monotonic() - self._began_at),
            f"about {format_duration(left_s)} left" if left_s is not None else "",
        )
        lines = [Text(self._describe_phase(stage))]
        if stage == "train" and self._view.ledger is not None:
            lines.append(Text(format_ticket_line(self._view.ledger), style="dim"))
        self._live.update(Group(head, *lines))

    def close(self) -> None:
        """Print what is new since the last refresh, and remove the panel."""
        try:
            super().close()
        finally:  # else the terminal stays without a cursor
            self._live.stop()


def _get_last_step(rows: Sequence[dict[str, Any]]) -> int:
    return int(rows[-1]["step"]) if rows else -1


def format_ticket_line(ledger: LedgerStatus) -> str:
    line = (
        f"tickets: {ledger.leased} running, {ledger.finished} finished, "
        f"{ledger.settled} settled, {ledger.trained} trained, {ledger.dropped} dropped"
    )
    if ledger.filtered:
        line += f", {ledger.filtered} filtered"
    if ledger.eval_total > ledger.eval_done:
        line += f"; evaluating {ledger.eval_done}/{ledger.eval_total}"
    return line


def _list_evaluated_steps(rows: Sequence[dict[str, Any]]) -> set[int]:
    return {row["step"] for row in rows if list_evaluated_sets(row)}
