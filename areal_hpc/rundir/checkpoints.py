"""Checkpoints of a trainer, read without torch: complete ones, their state and their index.

Each rank writes one file with the numbers that its optimizer steps, column after column: master
weights, both moments, weights. Every column has the same order. Behind the columns stand the
CRC-32s of their bytes, block by block. The index maps each part of a tensor to its position in a
rank's file.
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
"""The trainer could not read the batch, or a person set it aside with `areal-hpc quarantine`."""


class UntrainedBatchPart(msgspec.Struct, frozen=True):
    """A part of a consumed batch that the weights did not learn from."""

    step: int

    reason: str
    tickets: list[int] = []
    """Tickets left out for an unsound row. If empty, optimizer steps of the batch were skipped for
    a gradient that was not finite, or the batch is quarantined."""
    quarantine: QuarantineCause | None = None
    """Cause for which the whole batch was set aside unread; None if it was not."""


class RewardRange(msgspec.Struct, frozen=True):
    """The lowest and the highest reward of an episode that a run has trained on."""

    lowest: float
    highest: float


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a checkpoint in the run's history."""

    step: int = 0
    """Number of batches that these weights were trained on."""
    generation: int = 0
    """The start of the trainer that wrote the checkpoint."""
    seed: int
    """Seed of every random choice; with `step` it determines the next one."""
    base: str = ""
    """Digest of the model below an adapter; empty where all weights are trained."""
    parent: str | None = None
    """Checkpoint that this one was trained from."""
    consumed: list[int] = []
    """Steps of the manifests that these weights were trained on, from the first."""
    forks: list[GenerationFork] = []
    """Every generation of this chain of checkpoints, with its first step."""
    untrained: list[UntrainedBatchPart] = []
    """Parts of those batches that were not trained."""
    reward_range: RewardRange | None = None
    """Range of all batches so far; None before the first."""
    critic_batches: int = 0
    """Number of those batches since the critic began; 0 without a critic."""
    row: JsonMetricRow = {}
    """Metrics of this step as far as they are known; its line is written after the checkpoint."""


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
    """List checkpoints that interrupted trainers left, each with the generation that writes it."""
    writers = [
        (path, re.search(r"\.generation_(\d+)$", path.name)) for path in directory.glob(".step_*")
    ]
    return [(path, int(writer[1]) if writer else None) for path, writer in writers]


def write_trainer_state(path: Path, state: TrainerState) -> None:
    (path / TRAINER_STATE_FILE).write_bytes(msgspec.json.encode(state))


def read_trainer_state(path: Path) -> TrainerState:
    """Read the state of the checkpoint in this directory.

    Raises:
        FileNotFoundError: The state is missing, or a trainer has just removed the checkpoint.
        ShardError: The file of the state is damaged.
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
    """List every complete checkpoint by generation and step.

    A trainer that was replaced may still complete a higher step. Its checkpoint sorts before those
    of its successor, so that the newest generation's chain is followed. The problems of checkpoints
    that cannot be read are added to `problems`.

    Raises:
        ShardError: One is damaged, and `problems` is None.
    """
    checkpoints = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_complete_checkpoint(path):
            continue
        try:
            checkpoints.append(Checkpoint(path, read_trainer_state(path)))
        except FileNotFoundError:
            # A checkpoint that is no longer complete was removed just now.
            if problems is not None and is_complete_checkpoint(path):
                message = "the checkpoint has no list of consumed batches"
                problems.append(Problem(message, str(path / TRAINER_STATE_FILE)))
        except ShardError as error:
            if problems is None:
                raise
            problems += error.problems
    return sorted(checkpoints, key=lambda each: (each.state.generation, each.state.step))


def find_latest_checkpoint(directory: Path) -> Checkpoint | None:
    """Return the checkpoint that a restarted trainer resumes from; None before the first."""
    checkpoints = list_checkpoints(directory)
    return checkpoints[-1] if checkpoints else None


BASE_SAMPLES, BASE_SAMPLE_BYTES = 64, 64 * 1024
"""Samples of each file of weights: a digest of all bytes would take minutes."""


def digest_base(model_dir: Path) -> str:
    """Return a digest of a model's tensors: of names, positions, and samples of their numbers."""
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
    """Refuse a checkpoint with an adapter of another model, or with weights of another kind.

    Raises:
        RecipeError: The checkpoint does not hold what the recipe trains.
    """
    held, expected = (
        f"an adapter of the model {digest[:19]}" if digest else "all weights"
        for digest in (checkpoint.state.base, base)
    )
    if checkpoint.state.base != base:
        raise RecipeError(
            f"{checkpoint.path} has {held}, the recipe trains {expected}",
            key="trainer.lora",
            hint="go on with the model and the trainer.lora that the run began with",
        )


def build_checkpoint_write_error(path: Path, reason: object) -> ClusterError:
    """Build the error of a checkpoint that could not be written."""
    return ClusterError(
        f"a checkpoint could not be written: {reason}",
        key=str(path),
        hint="make room on the shared storage, or check its quota with lfs quota or quota -s",
    )


CHECKPOINT_FORMAT = 2
CHECKPOINT_INDEX_FILE = "index.json"
DIGEST_BLOCK_BYTES = 1024**2
"""Bytes per digest. A reader of a part of a file reads whole blocks and checks their digests."""
DIGEST_BYTES = 4

Column = Literal["master", "exp_avg", "exp_avg_sq", "weight"]
NumberType = Literal["float32", "bfloat16"]
BYTES_BY_NUMBER_TYPE: dict[NumberType, int] = {"float32": 4, "bfloat16": 2}


class TensorPiece(msgspec.Struct, frozen=True, array_like=True):
    """Block of a tensor whose numbers are contiguous in each column of a rank's file."""

    rank: int
    first: int
    """Index, among the rank's numbers, of the first number of the block."""
    offsets: tuple[int, ...]
    """Position of the block in the tensor, axis by axis."""
    sizes: tuple[int, ...]
    """Length of the block in each axis: 1 in all but the last two."""


class StoredTensor(msgspec.Struct, frozen=True):
    """Megatron parameter, with all of its layers and experts."""

    shape: tuple[int, ...]
    pieces: list[TensorPiece]


class RankIndex(msgspec.Struct, frozen=True):
    """Contents of one rank's file."""

    count: int
    """Numbers in each column."""
    tensors: dict[str, StoredTensor]


class CheckpointIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of all files of a checkpoint together."""

    format: int = CHECKPOINT_FORMAT
    optimizer_steps: int
    """AdamW's step count, the same for every parameter of the policy."""
    critic_steps: int = 0
    """AdamW's step count for a critic, whose tensors lie beside the policy's."""
    columns: dict[Column, NumberType]
    """Columns of every file, in order. Float32 weights have no master weights."""
    counts: list[int]
    """Numbers in each column of a rank's file, rank by rank."""
    tensors: dict[str, StoredTensor]

    def compute_data_bytes(self, rank: int) -> int:
        return compute_data_bytes(self.columns, self.counts[rank])

    def compute_offset_bytes(self, rank: int, column: Column, first: int) -> int:
        """Return the position of a number in a rank's file."""
        names = list(self.columns)
        before = {name: self.columns[name] for name in names[: names.index(column)]}
        start = compute_data_bytes(before, self.counts[rank])
        return start + first * BYTES_BY_NUMBER_TYPE[self.columns[column]]


def compute_data_bytes(columns: dict[Column, NumberType], count: int) -> int:
    return count * sum(BYTES_BY_NUMBER_TYPE[type_] for type_ in columns.values())


def count_digest_blocks(data_bytes: int) -> int:
    """Count the blocks of a file that have digests; the last block may be shorter."""
    return -(-data_bytes // DIGEST_BLOCK_BYTES)


def get_rank_file_path(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.bin"


def merge_rank_indices(
    rank_indices: Sequence[RankIndex],
    columns: dict[Column, NumberType],
    optimizer_steps: int,
    critic_steps: int = 0,
) -> CheckpointIndex:
    """Merge the indices of a checkpoint's ranks, given in rank order.

    A tensor that the ranks do not hold whole, or hold twice, fails an assertion.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in rank_indices:
        for name, held in part.tensors.items():
            known = tensors.setdefault(name, StoredTensor(held.shape, []))
            assert known.shape == held.shape, name
            known.pieces.extend(held.pieces)
    for name, tensor in tensors.items():
        count = sum(math.prod(piece.sizes) for piece in tensor.pieces)
        assert count == math.prod(tensor.shape), f"{name}: {count} numbers of {tensor.shape}"
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
    """Read the index of a checkpoint.

    Raises:
        FileNotFoundError: There is no index.
        ShardError: The index is damaged, or of a later format.
    """
    file = directory / CHECKPOINT_INDEX_FILE
    content = file.read_bytes()
    try:
        number = decode_json(content, _AnyFormat).format
        if number == CHECKPOINT_FORMAT:
            return decode_json(content, CheckpointIndex)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise build_checkpoint_damage_error(file, error) from error
    raise ShardError(
        f"the checkpoint is of format {number}; this version reads format {CHECKPOINT_FORMAT}",
        key=str(file),
        hint="resume the run with the version of areal_hpc that wrote it",
    )


class _AnyFormat(msgspec.Struct):
    format: int


def build_checkpoint_damage_error(file: Path, reason: object) -> ShardError:
    """Build the error of a checkpoint with a damaged file."""
    return ShardError(
        f"a checkpoint cannot be read: {reason}",
        key=str(file),
        hint=f"move {file.parent} aside: the run then goes on from the checkpoint before",
    )
