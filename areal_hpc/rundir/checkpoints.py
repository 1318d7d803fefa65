"""Checkpoints of a trainer: which of them are complete, and what each says of itself. No torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from areal_hpc.errors import ClusterError, Problem, ShardError
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.paths import format_step_dir
from areal_hpc.wire.weight_version import GenerationFork

COMPLETE_MARKER_FILE = "COMPLETE"
TRAINER_STATE_FILE = "trainer.json"


QuarantineCause = Literal["damaged", "requested"]
"""The trainer could not read the batch, or somebody asked for it with `areal-hpc quarantine`."""


class UntrainedBatchPart(msgspec.Struct, frozen=True):
    """A part of a consumed batch that the weights did not learn from."""

    step: int
    """The step of the batch."""
    reason: str
    tickets: list[int] = []
    """Those left out for an unsound row. Without any, optimizer steps of the batch were not taken
    because their gradient was not finite, or the batch is quarantined."""
    quarantine: QuarantineCause | None = None
    """Why the whole batch was set aside, unread; None if it was not."""


class RewardRange(msgspec.Struct, frozen=True):
    """The lowest and the highest reward of an episode that a run has trained on."""

    lowest: float
    highest: float


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a checkpoint in the run's history."""

    step: int = 0
    """Optimizer batches behind these weights."""
    generation: int = 0
    """The start of the trainer that wrote the checkpoint."""
    seed: int
    """Of everything random; with `step` it fixes what comes next."""
    parent: str | None = None
    """The checkpoint this one was trained from."""
    consumed: list[int] = []
    """Steps of the manifests behind these weights, from the first."""
    forks: list[GenerationFork] = []
    """Every generation of this chain of checkpoints, with the step it began from."""
    untrained: list[UntrainedBatchPart] = []
    """What those batches did not teach."""
    reward_range: RewardRange | None = None
    """Of all batches so far; None before the first."""
    critic_batches: int = 0
    """How many of those batches came since the critic began; 0 without one."""
    row: JsonMetricRow = {}
    """The metrics of this step as far as they were known: its line is written after it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: TrainerState

    @property
    def written_at(self) -> float:
        """Unix time at which it became complete."""
        return (self.path / COMPLETE_MARKER_FILE).stat().st_mtime


def is_complete_checkpoint(path: Path) -> bool:
    return (
        re.fullmatch(r"step_\d+", path.name) is not None and (path / COMPLETE_MARKER_FILE).exists()
    )


def get_unfinished_checkpoint_path(directory: Path, step: int, generation: int) -> Path:
    return directory / f".{format_step_dir(step)}.generation_{generation}"


def list_unfinished_checkpoints(directory: Path) -> list[tuple[Path, int | None]]:
    """What interrupted trainers left behind, with the generation that may still write it."""
    found = [
        (path, re.search(r"\.generation_(\d+)$", path.name)) for path in directory.glob(".step_*")
    ]
    return [(path, int(writer[1]) if writer else None) for path, writer in found]


def write_trainer_state(path: Path, state: TrainerState) -> None:
    (path / TRAINER_STATE_FILE).write_bytes(msgspec.json.encode(state))


def read_trainer_state(path: Path) -> TrainerState:
    """What the checkpoint in this directory says of itself.

    Raises:
        FileNotFoundError: It says nothing, or a trainer at work has removed it.
        ShardError: Its file is damaged.
    """
    file = path / TRAINER_STATE_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=TrainerState)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = f"move {path} away: the checkpoint before it takes its place"
        raise ShardError(
            f"the checkpoint cannot be read: {error}", key=str(file), hint=hint
        ) from error


def list_checkpoints(directory: Path, problems: list[Problem] | None = None) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first; a later generation's come after an earlier one's.

    A trainer that was replaced may still complete a higher step. It sorts before the checkpoints
    of its successor, so the newest generation's chain is the one that is followed. `problems`
    takes what is wrong with those that cannot be read.

    Raises:
        ShardError: One is damaged, and nobody takes problems.
    """
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_complete_checkpoint(path):
            continue
        try:
            found.append(Checkpoint(path, read_trainer_state(path)))
        except FileNotFoundError:
            if problems is not None and is_complete_checkpoint(
                path
            ):  # else it was removed just now
                message = "the checkpoint has no list of consumed batches"
                problems.append(Problem(message, str(path / TRAINER_STATE_FILE)))
        except ShardError as error:
            if problems is None:
                raise
            problems += error.problems
    return sorted(found, key=lambda one: (one.state.generation, one.state.step))


def find_latest_checkpoint(directory: Path) -> Checkpoint | None:
    """The checkpoint that a restarted trainer resumes from; None before the first."""
    found = list_checkpoints(directory)
    return found[-1] if found else None


def build_checkpoint_write_error(path: Path, reason: object) -> ClusterError:
    """The error of a checkpoint that the storage did not take."""
    return ClusterError(
        f"a checkpoint could not be written: {reason}",
        key=str(path),
        hint="make room on the shared storage, or check its quota with lfs quota or quota -s",
    )
