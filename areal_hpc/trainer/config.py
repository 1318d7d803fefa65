"""Typed configurations of the trainer's processes: RL, SFT, replay."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct
from pydantic import Field

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.recipe.sections.alerts import AlertsConfig
from areal_hpc.recipe.sections.trainer import SftConfig, TrainerConfig
from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.trainer.loop.schedule import EvaluationSetSchedule, Schedule

STOP_MARGIN_S = 4.0
"""A step or checkpoint that is not over this long before the job is killed is given up."""


class RankJobConfig(ProcessConfig):
    """Configuration of every rank of a training job."""

    ROLE = "train"

    model_path: Path
    """The model that training starts from."""
    seed: int
    """Recorded in checkpoints; decides the order of demonstrations."""
    trainer: TrainerConfig
    """Also of the SFT stage, whose layout, device, dtype and memory are the same."""
    sys_path: tuple[str, ...] = ()
    """Folders from which `trainer.objective.custom` is imported."""


class TrainerJobConfig(RankJobConfig):
    """Configuration of the trainer."""

    ENTRY = "areal_hpc.trainer.job:run"

    weights: WeightsConfig
    cells: Annotated[int, Field(ge=1)]
    """Cells to send them to, that of evaluation not counted."""
    evaluations: dict[str, EvaluationSetSchedule]
    """By the names of evaluation sets: when, and on how many tasks."""
    keep_best: str = ""
    """`SET/METRIC` by which the best checkpoint is kept; empty: none is."""
    evaluation_cell: bool = False
    """A cell of their own plays them, and training does not wait for it."""
    alerts: AlertsConfig = AlertsConfig()
    idle_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Time without any cell after which the job gives its nodes back, under Slurm."""
    stop_grace_s: Annotated[float, Field(gt=STOP_MARGIN_S)] = 12.0
    """Time from a stop signal to the kill."""

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            total_steps=self.trainer.total_steps,
            checkpoint_every_steps=self.trainer.checkpoint_every_steps,
            export_every_steps=self.trainer.export_every_steps,
            evaluations=self.evaluations,
        )


class ReplayJobConfig(RankJobConfig):
    """Configuration of a replay; its run directory leads to recorded batches."""

    ENTRY = "areal_hpc.trainer.job:run_replay"

    first_step: Annotated[int, Field(ge=1)]
    last_step: Annotated[int, Field(ge=1)]
    """It is saved."""
    forks: list[tuple[int, int]]
    """Every generation of the recorded run with the step it began from; the last one's is taken."""


class SftJobConfig(RankJobConfig):
    """Configuration of the SFT stage."""

    ENTRY = "areal_hpc.trainer.sft:run"

    dataset_path: Path
    """JSON lines `{"messages": [...]}`; the last message, the assistant's, is learnt."""
    sft: SftConfig


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
