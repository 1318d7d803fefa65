"""Progress of an evaluation without a trainer, in lines."""

import time

from areal_hpc.evaluation.ticket_numbers import LOADED_STEP
from areal_hpc.rundir.manifests import read_evaluated_tickets
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.live_progress import PlainReporter

LINES = 10
"""Lines about tasks that are done, of a whole evaluation."""
PERIOD_S = 30.0
"""With fewer tasks done in that time there is a line too."""


class EvaluationReporter(PlainReporter):
    """A line for every tenth of the tasks, and for what happens."""

    def __init__(self, paths: RunPaths, n_tasks: int) -> None:
        super().__init__(paths, total_steps=1, sft_steps=0)
        self._n_tasks = n_tasks
        self._told = -1
        self._told_at = time.monotonic()

    def _refresh(self, stage: str) -> None:
        done = len(read_evaluated_tickets(self._paths, LOADED_STEP))
        is_late = time.monotonic() - self._told_at >= PERIOD_S and done > self._told
        if self._told < 0 or done >= self._told + max(1, self._n_tasks // LINES) or is_late:
            self._told, self._told_at = done, time.monotonic()
            self.print_line(f"tasks    {done}/{self._n_tasks}")
