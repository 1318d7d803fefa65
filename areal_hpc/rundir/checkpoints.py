"""Checkpoints of a trainer without torch: which are complete, what each says of itself and holds.

Each rank writes one file. It has the numbers that the rank's optimizer steps, column after column:
master weights, both moments, weights. In every column they are in the same order. Behind the
columns stand the CRC-32s of their bytes, block by block. The index names which part of which tensor
is where in which rank's file.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from areal_hpc.errors import ClusterError, Problem, RecipeError, ShardError
from areal_hpc.rundir.jsonl import JsonMetricRow
from areal_hpc.rundir.paths import format_step_dir
from areal_hpc.wire.decoding import decode_json
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
    base: str = ""
    """Digest of the model that an adapter changes; empty where all weights are trained."""
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
        return decode_json(file.read_bytes(), TrainerState)
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


BASE_SAMPLES, BASE_SAMPLE_BYTES = 64, 64 * 1024
"""Of each file: a digest of all bytes would take minutes."""


def digest_base(model_dir: Path) -> str:
    """A digest of a model's tensors: of their names, their places, and samples of their numbers."""
    digest = hashlib.sha256()
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            first = file.tell()
            for sample in range(BASE_SAMPLES):
                file.seek(first + (size - first) * sample // BASE_SAMPLES)
                digest.update(file.read(BASE_SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


def require_same_base(checkpoint: Checkpoint, base: str) -> None:
    """Refuse an adapter of another model, and one in the place of all weights or the reverse.

    Raises:
        RecipeError: The checkpoint is not of what the recipe trains.
    """
    found, expected = (
        f"an adapter of the model {digest[:19]}" if digest else "all weights"
        for digest in (checkpoint.state.base, base)
    )
    if checkpoint.state.base != base:
        raise RecipeError(
            f"{checkpoint.path} has {found}, the recipe trains {expected}",
            key="trainer.lora",
            hint="go on with the model and the trainer.lora that the run began with",
        )


def build_checkpoint_write_error(path: Path, reason: object) -> ClusterError:
    """The error of a checkpoint that the storage did not take."""
    return ClusterError(
        f"a checkpoint could not be written: {reason}",
        key=str(path),
        hint="make room on the shared storage, or check its quota with lfs quota or quota -s",
    )


CHECKPOINT_FORMAT = 2
CHECKPOINT_INDEX_FILE = "index.json"
DIGEST_BLOCK_BYTES = 1024**2
"""Who needs a part of a file reads whole blocks, which are compared with their digests."""
DIGEST_BYTES = 4

Column = Literal["master", "exp_avg", "exp_avg_sq", "weight"]
NumberType = Literal["float32", "bfloat16"]
BYTES_BY_NUMBER_TYPE: dict[NumberType, int] = {"float32": 4, "bfloat16": 2}


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """A block of a tensor, its numbers one after another in each column of a rank's file."""

    rank: int
    first: int
    """Which of the rank's numbers is the first of the block."""
    offsets: tuple[int, ...]
    """Where in the tensor the block begins, axis by axis."""
    sizes: tuple[int, ...]
    """Its length in each axis: 1 in all but the last two."""


class StoredTensor(msgspec.Struct, frozen=True):
    """A Megatron parameter of all layers and experts."""

    shape: tuple[int, ...]
    pieces: list[TensorPiece]


class RankIndex(msgspec.Struct, frozen=True):
    """What one rank's file holds."""

    count: int
    """Numbers in each column."""
    tensors: dict[str, StoredTensor]


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What all files of a checkpoint hold together."""

    format: int = CHECKPOINT_FORMAT
    optimizer_steps: int
    """Steps that AdamW has counted, the same for every parameter of the policy."""
    critic_steps: int = 0
    """Those that it has counted for a critic, whose tensors lie beside the policy's."""
    columns: dict[Column, NumberType]
    """Columns of every file, in their order. Of float32 weights there are no master weights."""
    counts: list[int]
    """Numbers in each column of a rank's file, rank by rank."""
    tensors: dict[str, StoredTensor]

    def compute_data_bytes(self, rank: int) -> int:
        return compute_data_bytes(self.columns, self.counts[rank])

    def compute_offset_bytes(self, rank: int, column: Column, first: int) -> int:
        """Where in a rank's file one of its numbers is."""
        names = list(self.columns)
        before = {name: self.columns[name] for name in names[: names.index(column)]}
        start = compute_data_bytes(before, self.counts[rank])
        return start + first * BYTES_BY_NUMBER_TYPE[self.columns[column]]


def compute_data_bytes(columns: dict[Column, NumberType], count: int) -> int:
    return count * sum(BYTES_BY_NUMBER_TYPE[type_] for type_ in columns.values())


def count_digest_blocks(data_bytes: int) -> int:
    """Blocks of a file, each with a digest; the last one may be shorter."""
    return -(-data_bytes // DIGEST_BLOCK_BYTES)


def get_rank_file_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.bin"


def merge_rank_indices(
    rank_indices: Sequence[RankIndex],
    columns: dict[Column, NumberType],
    optimizer_steps: int,
    critic_steps: int = 0,
) -> CheckpointIndex:
    """The index of a checkpoint from those of its ranks, in their order.

    Tensors that the ranks do not hold whole, or hold twice, are a defect of ours.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in rank_indices:
        for name, held in part.tensors.items():
            known = tensors.setdefault(name, StoredTensor(held.shape, []))
            assert known.shape == held.shape, name
            known.pieces.extend(held.pieces)
    for name, one in tensors.items():
        count = sum(math.prod(piece.sizes) for piece in one.pieces)
        assert count == math.prod(one.shape), f"{name}: {count} numbers of {one.shape}"
    return CheckpointIndex(
        optimizer_steps=optimizer_steps,
        critic_steps=critic_steps,
        columns=columns,
        counts=[part.count for part in rank_indices],
        tensors=tensors,
    )


def write_checkpoint_index(directory: Path, index: CheckpointIndex) -> None:
    (directory / CHECKPOINT_INDEX_FILE).write_bytes(msgspec.json.encode(index))


def read_checkpoint_index(directory: Path) -> CheckpointIndex:
    """What the files of a checkpoint hold.

    Raises:
        FileNotFoundError: There is no index.
        ShardError: It is damaged, or of a later format.
    """
    file = directory / CHECKPOINT_INDEX_FILE
    content = file.read_bytes()
    try:
        found = decode_json(content, _AnyFormat).format
        if found == CHECKPOINT_FORMAT:
            return decode_json(content, CheckpointIndex)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise build_checkpoint_damage_error(file, error) from error
    raise ShardError(
        f"the checkpoint is of format {found}; this version reads format {CHECKPOINT_FORMAT}",
        key=str(file),
        hint="resume the run with the version of areal_hpc that wrote it",
    )


class _AnyFormat(msgspec.Struct):
    format: int


def build_checkpoint_damage_error(file: Path, reason: object) -> ShardError:
    """The error of a checkpoint with a file that is not as it was written."""
    return ShardError(
        f"a checkpoint cannot be read: {reason}",
        key=str(file),
        hint=f"move {file.parent} aside: the run then goes on from the checkpoint before",
    )
