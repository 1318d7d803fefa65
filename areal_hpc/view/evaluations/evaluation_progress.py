"""Progress of an evaluation without a trainer, in lines."""

import time
from collections.abc import Sequence

from areal_hpc.dataset.materialize import count_materialized_rows
from areal_hpc.evaluation.ticket_numbers import STEP_OF_LOADED_WEIGHTS, split_ticket_id
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir.manifests import read_evaluated_tickets
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.live_progress import PlainReporter

N_PROGRESS_LINES = 10
MAX_SILENCE_OF_PROGRESS_S = 30.0


class EvaluationReporter(PlainReporter):
    def __init__(self, paths: RunPaths, sets: Sequence[EvaluationSet]) -> None:
        super().__init__(paths, total_steps=1, sft_steps=0)
        self._sets = sets
        self._n_tasks: int | None = None
        self._set_numbers = {one.number for one in sets}
        self._told = -1
        self._told_at = time.monotonic()

    def _count_tasks(self) -> int:
        """Tasks that are played: a set may have fewer than the recipe's bound.

        The bounds alone are known until the sets are in place.
        """
        if self._n_tasks is None:
            files = [self._paths.evaluation_tasks(one.name) for one in self._sets]
            if not all(file.exists() for file in files):
                return sum(one.tasks for one in self._sets)
            self._n_tasks = sum(
                min(one.tasks, count_materialized_rows(file))
                for one, file in zip(self._sets, files, strict=True)
            )
        return self._n_tasks

    def _refresh(self, stage: str) -> None:
        tickets = read_evaluated_tickets(self._paths, STEP_OF_LOADED_WEIGHTS)
        done = sum(split_ticket_id(one.ticket_id)[0] in self._set_numbers for one in tickets)
        is_late = (
            time.monotonic() - self._told_at >= MAX_SILENCE_OF_PROGRESS_S and done > self._told
        )
        total = self._count_tasks()
        if self._told < 0 or done >= self._told + max(1, total // N_PROGRESS_LINES) or is_late:
            self._told, self._told_at = done, time.monotonic()
            self.print_line(f"tasks    {done}/{total}")
