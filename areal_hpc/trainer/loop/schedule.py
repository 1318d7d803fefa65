"""Schedule: which steps evaluate, checkpoint and export. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps get what."""

    total_steps: int
    checkpoint_every_steps: int
    export_every_steps: int | None
    """0 exports only the last step, None exports nothing."""
    evaluation_every_steps: int
    """0 evaluates only the first and the last weights."""
    evaluation_tasks: int
    """0 never evaluates."""

    def evaluates(self, step: int) -> bool:
        """The weights of `step` are judged on held-out tasks."""
        regular = _is_multiple(step, self.evaluation_every_steps)
        return self.evaluation_tasks > 0 and (regular or step in (0, self.total_steps))

    def list_evaluation_steps(self, after: int, until: int) -> list[int]:
        """The steps above `after`, up to `until`, whose weights are judged, in order."""
        return [step for step in range(after + 1, until + 1) if self.evaluates(step)]

    def saves_checkpoint(self, step: int) -> bool:
        """The work up to `step` is made durable without being asked."""
        return step > 0 and (step % self.checkpoint_every_steps == 0 or step == self.total_steps)

    def exports_model(self, step: int) -> bool:
        """The weights of `step` are written as a Hugging Face model."""
        if self.export_every_steps is None or step == 0:
            return False
        return step == self.total_steps or _is_multiple(step, self.export_every_steps)

    def is_finished_once_saved(self, step: int) -> bool:
        """`step` is the last one, and its weights are neither exported nor evaluated."""
        return (
            step >= self.total_steps and not self.exports_model(step) and not self.evaluates(step)
        )


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
