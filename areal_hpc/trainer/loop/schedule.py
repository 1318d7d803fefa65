"""Schedule: which steps evaluate, checkpoint and export. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EvaluationSetSchedule:
    """When the weights are judged on an evaluation set, and on how many of its tasks."""

    every_steps: int
    """0 evaluates only the first and the last weights."""
    n_tasks: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps get what."""

    total_steps: int
    checkpoint_every_steps: int
    export_every_steps: int | None
    """0 exports only the last step, None exports nothing."""
    evaluations: Mapping[str, EvaluationSetSchedule] = field(default_factory=dict)
    """By the names of evaluation sets; without any nothing is evaluated."""

    def count_tasks_by_due_set(self, step: int) -> dict[str, int]:
        """The evaluation sets on which the weights of `step` are judged, each with its tasks."""
        is_end = step in (0, self.total_steps)
        return {
            name: one.n_tasks
            for name, one in self.evaluations.items()
            if is_end or _is_multiple(step, one.every_steps)
        }

    def evaluates(self, step: int) -> bool:
        return bool(self.count_tasks_by_due_set(step))

    def list_evaluation_steps(self, after_step: int, last_step: int) -> list[int]:
        return [step for step in range(after_step + 1, last_step + 1) if self.evaluates(step)]

    def count_tasks_by_set_due_since(self, after_step: int, last_step: int) -> dict[str, int]:
        steps = self.list_evaluation_steps(after_step, last_step)
        return {name: n for step in steps for name, n in self.count_tasks_by_due_set(step).items()}

    def saves_checkpoint(self, step: int) -> bool:
        return step > 0 and (step % self.checkpoint_every_steps == 0 or step == self.total_steps)

    def exports_model(self, step: int) -> bool:
        if self.export_every_steps is None or step == 0:
            return False
        return step == self.total_steps or _is_multiple(step, self.export_every_steps)

    def is_finished_once_saved(self, step: int) -> bool:
        return (
            step >= self.total_steps and not self.exports_model(step) and not self.evaluates(step)
        )


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
