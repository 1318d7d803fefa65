"""Configurations of trainer processes (RL, SFT, replay), and the schedule of a run's steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct
from pydantic import Field

from areal_hpc.jobs.config import ProcessConfig

STOP_MARGIN_S = 4.0
"""Seconds before the job is killed at which an unfinished step or checkpoint is abandoned."""


@dataclass(frozen=True, slots=True)
class EvaluationSetSchedule:
    """Steps whose weights are evaluated on an evaluation set, and the number of its tasks."""

    every_steps: int
    """0 evaluates only the first and the last weights."""
    n_tasks: int


@dataclass(frozen=True, slots=True)
class Schedule:
    total_steps: int
    checkpoint_every_steps: int
    export_every_steps: int | None
    """0 exports only the last step, None exports nothing."""
    evaluations: Mapping[str, EvaluationSetSchedule] = field(default_factory=dict)
    """Schedules by name of evaluation set; empty if nothing is evaluated."""

    def count_tasks_by_due_set(self, step: int) -> dict[str, int]:
        """Return the evaluation sets due for the weights of `step`, each with its tasks."""
        is_end = step in (0, self.total_steps)
        return {
            name: evaluation_set.n_tasks
            for name, evaluation_set in self.evaluations.items()
            if is_end or _is_multiple(step, evaluation_set.every_steps)
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


class RankJobConfig(ProcessConfig):
    ROLE = "train"

    model_path: Path
    """Model from which training starts."""
    sys_path: tuple[str, ...] = ()
    """Folders from which `trainer.objective.custom` is imported."""


class TrainerJobConfig(RankJobConfig):
    ENTRY = "areal_hpc.trainer.job:run"

    tasks_by_evaluation_set: dict[str, int]
    """Number of held-out tasks by evaluation set, without empty sets."""

    @property
    def schedule(self) -> Schedule:
        trainer, counts = self.recipe.trainer, self.tasks_by_evaluation_set
        return Schedule(
            total_steps=trainer.total_steps,
            checkpoint_every_steps=trainer.checkpoint_every_steps,
            export_every_steps=trainer.export_every_steps,
            evaluations={
                dataset.name: EvaluationSetSchedule(
                    dataset.every_steps, min(dataset.tasks, counts[dataset.name])
                )
                for dataset in self.recipe.evaluation_sets
                if dataset.name in counts
            },
        )


class ReplayJobConfig(RankJobConfig):
    """Configuration of a replay; its run directory leads to recorded batches."""

    ENTRY = "areal_hpc.trainer.job:run_replay"

    first_step: Annotated[int, Field(ge=1)]
    last_step: Annotated[int, Field(ge=1)]
    """Last step; the replay saves it."""
    forks: list[tuple[int, int]]
    """Each generation of the recorded run and its first step; the replay uses the last one."""
    first_changed_step: int | None = None
    """First step that learns something else than the recorded one; None if none does."""


class SftJobConfig(RankJobConfig):
    ENTRY = "areal_hpc.trainer.sft:run"

    dataset_path: Path
    """Demonstrations (`areal_hpc/dataset/demonstrations.py`)."""
    evaluation_path: Path | None = None
    """Held-out demonstrations."""


class CollectivesRequest(Struct, frozen=True):
    """Request to each rank of `trainer.collective_rates`: take part in all-reduces and a ring."""

    device: Literal["cpu", "cuda"]
    size_bytes: int
    """Size of each rank's tensor."""
    rounds: int
    """Rounds that are measured."""
    rendezvous_dir: str
    report: str
    """Path that rank 0 writes the rates to."""


class CollectiveRates(Struct, frozen=True, tag=True):
    """Rates of collectives between ranks; each is that of the slowest rank."""

    ranks: int
    backend: str
    size_bytes: int
    all_reduce_bytes_per_s: float
    """Bus bandwidth as NCCL's tests define it: 2 (n - 1) / n times the bytes, over the time."""
    ring_bytes_per_s: float
    """Rate at which each rank sends to one neighbor while it receives as much from the other."""
    wrong_elements: int
    """Wrong elements of the results, summed over all ranks."""
