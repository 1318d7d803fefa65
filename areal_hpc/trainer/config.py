"""Facts that the trainer's processes are told: RL, SFT, replay."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct
from pydantic import Field

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.trainer.loop.schedule import EvaluationSetSchedule, Schedule

STOP_MARGIN_S = 4.0
"""A step or checkpoint that is not over this long before the job is killed is given up."""


class RankJobConfig(ProcessConfig):
    """Facts of every rank of a training job."""

    ROLE = "train"

    model_path: Path
    """The model that training starts from."""
    sys_path: tuple[str, ...] = ()
    """Folders from which `trainer.objective.custom` is imported."""


class TrainerJobConfig(RankJobConfig):
    ENTRY = "areal_hpc.trainer.job:run"

    tasks_by_evaluation_set: dict[str, int]
    """Held-out tasks that there are, of the sets that have some."""

    @property
    def schedule(self) -> Schedule:
        trainer, known = self.recipe.trainer, self.tasks_by_evaluation_set
        return Schedule(
            total_steps=trainer.total_steps,
            checkpoint_every_steps=trainer.checkpoint_every_steps,
            export_every_steps=trainer.export_every_steps,
            evaluations={
                one.name: EvaluationSetSchedule(one.every_steps, min(one.tasks, known[one.name]))
                for one in self.recipe.evaluation_sets
                if one.name in known
            },
        )


class ReplayJobConfig(RankJobConfig):
    """Facts of a replay; its run directory leads to recorded batches."""

    ENTRY = "areal_hpc.trainer.job:run_replay"

    first_step: Annotated[int, Field(ge=1)]
    last_step: Annotated[int, Field(ge=1)]
    """It is saved."""
    forks: list[tuple[int, int]]
    """Every generation of the recorded run with the step it began from; the last one's is taken."""


class SftJobConfig(RankJobConfig):
    """Facts of the SFT stage."""

    ENTRY = "areal_hpc.trainer.sft:run"

    dataset_path: Path
    """JSON lines `{"messages": [...]}`; the last message, the assistant's, is learnt."""


class CollectivesRequest(Struct, frozen=True):
    """To each rank of `trainer.collective_rates`: take part in all-reduces and a ring."""

    device: Literal["cpu", "cuda"]
    size_bytes: int
    """Of each rank's tensor."""
    rounds: int
    """Rounds that count."""
    rendezvous_dir: str
    report: str
    """Written by rank 0."""


class CollectiveRates(Struct, frozen=True, tag=True):
    """Rates of collectives between ranks, by the slowest of them."""

    ranks: int
    backend: str
    size_bytes: int
    all_reduce_bytes_per_s: float
    """Bus bandwidth, as NCCL's tests count it: 2 (n - 1) / n times the bytes, over the time."""
    ring_bytes_per_s: float
    """What each rank sends to its neighbor while it receives as much from the other one."""
    wrong_elements: int
    """Elements of results, over all ranks, that are not what they must be."""
