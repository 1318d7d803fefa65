"""What happens at which step. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from areal_hpc.trainer.config import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of optimizer step `step`, counted from 0, out of `total_steps`."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    last = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, max(0.0, (step - config.warmup_steps) / last))
    if config.decay == "constant":
        return config.lr * warmup
    linear = 1.0 - progress
    share = linear if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * warmup * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps get what."""

    total_steps: int
    commit_every_steps: int
    export_every_steps: int
    """0 exports only the last step."""
    evaluation_every_steps: int
    """0 evaluates only the first and the last weights."""
    evaluation_tasks: int
    """0 never evaluates."""

    def evaluates(self, step: int) -> bool:
        """The weights of `step` are judged on held-out tasks."""
        every = self.evaluation_every_steps
        regular = every > 0 and step % every == 0
        return self.evaluation_tasks > 0 and (regular or step in (0, self.total_steps))

    def evaluated_steps(self, after: int, until: int) -> list[int]:
        """The steps above `after`, up to `until`, whose weights are judged, in order."""
        if not self.evaluation_tasks:
            return []
        every = self.evaluation_every_steps
        regular = range((after // every + 1) * every, until + 1, every) if every else ()
        ends = (step for step in (0, self.total_steps) if after < step <= until)
        return sorted({*regular, *ends})

    def commits(self, step: int) -> bool:
        """The work up to `step` is made durable without being asked."""
        return step > 0 and (step % self.commit_every_steps == 0 or step == self.total_steps)

    def exports(self, step: int) -> bool:
        """The weights of `step` are written as a Hugging Face model."""
        every = self.export_every_steps
        return step > 0 and (step == self.total_steps or (every > 0 and step % every == 0))
