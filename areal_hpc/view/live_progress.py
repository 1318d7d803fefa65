"""Live progress: a terminal panel or plain lines."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_hpc.metrics.alerts import AlertTracker
from areal_hpc.metrics.step_metrics import EVAL_REWARD_METRIC
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.health import format_alert, read_alerts_config
from areal_hpc.view.run_state import RunSnapshot, read_run_snapshot

MAX_SFT_LINES = 10
"""Lines SFT prints."""
REFRESH_S = 1.0
"""Shortest time between two looks at the run."""


class PlainReporter:
    """One line per finished step, for logs and pipes."""

    def __init__(
        self, paths: RunPaths, total_steps: int, sft_steps: int, console: Console | None = None
    ) -> None:
        self._paths = paths
        self._total_steps = total_steps
        self._sft_steps = sft_steps
        self._console = console or Console(highlight=False, soft_wrap=True)
        before = read_run_snapshot(paths)
        self._last_step = _get_last_step(before.steps)
        self._last_sft = _get_last_step(before.sft)
        self._evaluated = {step for step, _ in before.evaluations}
        self._alerts: AlertTracker | None = None
        self._looked_at = 0.0

    def print_line(self, message: str) -> None:
        """Print a line."""
        self._console.print(message)

    def show_progress(self, stage: str) -> None:
        """Show what is new of a stage, about once a second."""
        if time.monotonic() - self._looked_at >= REFRESH_S:
            self._looked_at = time.monotonic()
            self._refresh(stage)

    def _refresh(self, stage: str) -> None:
        self.report_new_steps()

    def report_new_steps(self) -> None:
        """Print a line for every step that finished since the last look."""
        snapshot = read_run_snapshot(self._paths)
        # Both fall back when a run starts anew or resumes from a checkpoint.
        self._last_step = min(self._last_step, _get_last_step(snapshot.steps))
        self._last_sft = min(self._last_sft, _get_last_step(snapshot.sft))
        for row in snapshot.sft:
            if row["step"] >= self._last_sft + self._sft_steps / MAX_SFT_LINES:
                self._last_sft = row["step"]
                loss = format_metric(row["loss"], ".4f")
                self.print_line(f"SFT      {row['step']:>5}/{self._sft_steps}  loss {loss}")
        for number, row in enumerate(snapshot.steps):
            if row["step"] > self._last_step:
                self._last_step = row["step"]
                self.print_line(format_step_line(row, self._total_steps))
                self._report_new_alerts(snapshot.steps[:number], row)
            elif EVAL_REWARD_METRIC in row and row["step"] not in self._evaluated:
                evaluation = {"step": row["step"], EVAL_REWARD_METRIC: row[EVAL_REWARD_METRIC]}
                self.print_line(format_step_line(evaluation, self._total_steps))
        self._evaluated = {step for step, _ in snapshot.evaluations}

    def _report_new_alerts(self, before: Sequence[dict[str, Any]], row: dict[str, Any]) -> None:
        """Print what a step's metrics say of the run's health that those before did not."""
        if self._alerts is None:  # the recipe is in place once a step is
            self._alerts = AlertTracker(read_alerts_config(self._paths))
            self._alerts.find_new(before)
        for alert in self._alerts.find_new([*before, row]):
            self.print_line(format_alert(alert))

    def close(self) -> None:
        """Print what the last look missed."""
        self.report_new_steps()


class LiveReporter(PlainReporter):
    """A panel that refreshes in place; finished steps scroll by above it."""

    def __init__(self, paths: RunPaths, total_steps: int, sft_steps: int) -> None:
        self._live = Live(console=Console(highlight=False), refresh_per_second=4, transient=True)
        super().__init__(paths, total_steps, sft_steps, self._live.console)
        self._live.start()
        self._began_at = time.monotonic()

    def _refresh(self, stage: str) -> None:
        self.report_new_steps()
        snapshot = read_run_snapshot(self._paths, ask_ledger=stage == "train")
        rows, total = snapshot.steps, self._total_steps
        if stage == "sft":
            rows, total = snapshot.sft, self._sft_steps
        done = rows[-1]["step"] if rows else 0
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(stage, style="bold"),
            ProgressBar(total=total, completed=done, width=40),
            f"step {done}/{total}",
            f"{time.monotonic() - self._began_at:.0f} s",
        )
        self._live.update(Group(head, Text(format_ticket_line(snapshot), style="dim")))

    def close(self) -> None:
        """Remove the panel and print what the last look missed."""
        super().close()
        self._live.stop()


def _get_last_step(rows: Sequence[dict[str, Any]]) -> int:
    return int(rows[-1]["step"]) if rows else -1


def format_metric(number: float | None, form: str) -> str:
    """A metric for people; None stands for one that is not finite."""
    return "not finite" if number is None else format(number, form)


def format_step_line(row: dict[str, Any], total: int) -> str:
    """One trained step, for people."""
    evaluated = (
        f"  held-out {format_metric(row[EVAL_REWARD_METRIC], '.3f')}"
        if EVAL_REWARD_METRIC in row
        else ""
    )
    if "reward/mean" not in row:
        return f"step  {row['step']:>5}/{total}{evaluated}"
    gap = "not compared"
    if row["logprob/compared_tokens"]:
        gap = format_metric(row["logprob/engine_trainer_max_abs_diff"], ".1e")
    return (
        f"step  {row['step']:>5}/{total}"
        f"  reward {format_metric(row['reward/mean'], '.3f')}{evaluated}"
        f"  {format_metric(row.get('throughput/wall_tokens_per_s'), '.0f')} tok/s"
        f"  staleness {format_metric(row['staleness/mean'], '.1f')} (max {row['staleness/max']})"
        f"  engine-trainer {gap}"
    )


def format_ticket_line(snapshot: RunSnapshot) -> str:
    """Line about the ledger's tickets."""
    ledger = snapshot.ledger
    if ledger is None:
        return "starting"
    line = (
        f"tickets: {ledger.leased} running, {ledger.finished} finished, "
        f"{ledger.settled} settled, {ledger.trained} trained, {ledger.dropped} dropped"
    )
    if ledger.filtered:
        line += f", {ledger.filtered} filtered"
    if ledger.requeued:
        line += f", {ledger.requeued} requeued as stale"
    if ledger.eval_total > ledger.eval_done:
        line += f"; evaluating {ledger.eval_done}/{ledger.eval_total}"
    return line
