"""Files of the ledger: batch manifests, dropped tickets, evaluation results, its own state.

A quarantined batch is consumed like any other, but not trained. A file of `quarantine/` counts
whenever its batch is handed out: it holds for a batch that no checkpoint has consumed. Of those
behind a checkpoint, the checkpoint itself says what was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from areal_hpc.errors import Problem, ShardError
from areal_hpc.rundir.checkpoints import TrainerState, UntrainedBatchPart, find_latest_checkpoint
from areal_hpc.rundir.files import fsync_path, write_atomic, write_once
from areal_hpc.rundir.jsonl import append_line, read_readable_records, replace_lines
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.decoding import decode_json
from areal_hpc.wire.fault_points import fault_point
from areal_hpc.wire.ledger import BatchManifest, TicketRef
from areal_hpc.wire.weight_version import GenerationFork

RecordT = TypeVar("RecordT")
DropKind = Literal["failed", "filtered", "stale"]


class LedgerState(msgspec.Struct, frozen=True):
    """State of the ledger that manifests and shards do not hold."""

    incarnation: int = 0
    """Number of times that the ledger was started."""
    generation: int = 0
    """The newest generation a trainer opened."""
    version_step: int = 0
    """The last step that trainer published, or resumed from."""
    forks: tuple[GenerationFork, ...] = ()
    """Every generation opened so far, with the step it began from."""

    def with_opened_generation(self, generation: int, base_step: int) -> LedgerState:
        earlier = (fork for fork in self.forks if fork.generation != generation)
        forks = (*earlier, GenerationFork(generation, base_step))
        return LedgerState(self.incarnation, generation, base_step, forks)

    def has_kept_weights(self, step: int, generation: int) -> bool:
        later = (fork for fork in self.forks if fork.generation > generation)
        return all(step <= fork.base_step for fork in later)


class EvaluationResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rewards of one step's weights on an evaluation set, as kept in `evaluations/`."""

    step: int
    n_tasks: int
    mean_reward: float
    rewards: list[float]
    """By task index: the mean over the task's samples."""
    failures: dict[int, str]
    """Task index -> reason, of episodes that could not be run; they count as reward 0."""
    generation: int
    """The generation whose weights these were."""
    samples: list[list[float]] = []
    """By task index, the reward of each sample; empty where a task has one."""
    answers: list[list[str]] = []
    """By task index, what each sample answered; empty if none says."""

    def list_sample_rewards(self) -> list[list[float]]:
        return self.samples or [[reward] for reward in self.rewards]


class EvaluatedTicket(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task of an evaluation under way that is done: it is not played again."""

    ticket_id: int
    generation: int
    """The generation whose weights these were."""
    rewards: list[float]
    """Of each sample."""
    answers: list[str] = []
    """What each sample answered; empty if none says."""


class DroppedTicket(msgspec.Struct, frozen=True):
    """A line of `dropped_tickets.jsonl`: a ticket that is not trained, and why. Final."""

    ref: TicketRef
    reason: str
    kind: DropKind = "failed"
    rewards: list[float] = []
    """Of the episodes of a `filtered` group."""


def write_manifest(paths: RunPaths, manifest: BatchManifest) -> BatchManifest:
    """Make a batch durable, once and for all. It may be handed out only after this returns.

    A manifest is never replaced, because checkpoints name batches by their step alone.

    Returns:
        The batch of that step: another ledger's, if that one was first.
    """
    is_first = write_once(paths.manifest(manifest.step), msgspec.json.encode(manifest))
    return manifest if is_first else read_manifest(paths, manifest.step)


def read_manifest(paths: RunPaths, step: int) -> BatchManifest:
    """The batch of `step` exactly as it was handed out.

    Raises:
        ShardError: The file is gone or damaged.
    """
    manifest = read_json_file(paths.manifest(step), BatchManifest)
    if manifest is None:
        raise ShardError(
            f"the batch of step {step} was handed out, but its manifest is gone",
            key=str(paths.manifest(step)),
            hint="restore the file from a backup of the run directory",
        )
    return manifest


def read_manifests(paths: RunPaths) -> Iterator[BatchManifest]:
    """Every batch handed out, in the order of steps. Files left by a crash are skipped."""
    for step in list_manifest_steps(paths):
        yield read_manifest(paths, step)


def list_manifest_steps(paths: RunPaths) -> list[int]:
    return list_batch_steps(paths.manifests_dir)


def list_batch_steps(directory: Path) -> list[int]:
    names = (path.stem.removeprefix("batch_") for path in directory.glob("batch_*.json"))
    return sorted(int(name) for name in names if name.isdigit())


def write_ledger_state(paths: RunPaths, state: LedgerState) -> None:
    write_atomic(paths.ledger_state, msgspec.json.encode(state))


def read_ledger_state(paths: RunPaths) -> LedgerState:
    return read_json_file(paths.ledger_state, LedgerState) or LedgerState()


def write_evaluation(paths: RunPaths, set_name: str, result: EvaluationResult) -> None:
    write_atomic(paths.evaluation(result.step, set_name), msgspec.json.encode(result))


def read_evaluation(paths: RunPaths, step: int, set_name: str) -> EvaluationResult | None:
    return read_json_file(paths.evaluation(step, set_name), EvaluationResult)


def read_kept_evaluation(paths: RunPaths, step: int, set_name: str) -> EvaluationResult | None:
    """The result of a set for weights of `step` that the run still has; None without one."""
    result = read_evaluation(paths, step, set_name)
    if result is None or read_ledger_state(paths).has_kept_weights(step, result.generation):
        return result
    return None


def append_evaluated_ticket(paths: RunPaths, step: int, ticket: EvaluatedTicket) -> None:
    """Append the rewards of one task, without fsync: a lost node costs its last tasks."""
    paths.evaluations_dir.mkdir(exist_ok=True)
    append_line(paths.evaluated_tickets(step), ticket)


def read_evaluated_tickets(paths: RunPaths, step: int) -> list[EvaluatedTicket]:
    return read_readable_records(paths.evaluated_tickets(step), EvaluatedTicket)


def replace_evaluated_tickets(
    paths: RunPaths, step: int, tickets: Sequence[EvaluatedTicket]
) -> None:
    """Keep these tasks of an evaluation alone; the file of none is removed."""
    if tickets:
        replace_lines(paths.evaluated_tickets(step), tickets)
    else:
        paths.evaluated_tickets(step).unlink(missing_ok=True)


def list_kept_evaluations(paths: RunPaths, main_set: str) -> Iterator[tuple[str, EvaluationResult]]:
    """Every result with the name of its set, by set and step; those of `main_set` come first.

    Those of weights that a trainer which resumed from an earlier step gave up are left out.
    """
    state, folder = read_ledger_state(paths), paths.evaluations_dir
    names = sorted(one.name for one in folder.iterdir() if one.is_dir()) if folder.is_dir() else ()
    for name in (main_set, *names):
        for file in sorted(paths.evaluation(0, name).parent.glob("*.json")):
            result = read_json_file(file, EvaluationResult)
            if result and state.has_kept_weights(result.step, result.generation):
                yield name, result


def group_kept_evaluations(
    paths: RunPaths, main_set: str, problems: list[str]
) -> dict[str, list[EvaluationResult]]:
    """Every result by set and step, up to one that is damaged, which is named in `problems`."""
    found: dict[str, list[EvaluationResult]] = {}
    try:
        for name, result in list_kept_evaluations(paths, main_set):
            found.setdefault(name, []).append(result)
    except ShardError as error:
        problems.append(str(error))
    return found


def append_drop(paths: RunPaths, dropped_ticket: DroppedTicket) -> None:
    """Make a drop durable. Repeating it is harmless: the first line of a ticket counts."""
    append_line(paths.drops, dropped_ticket, sync=True)


def read_drops(paths: RunPaths) -> list[DroppedTicket]:
    return read_readable_records(paths.drops, DroppedTicket)


def read_json_file(path: Path, record_type: type[RecordT]) -> RecordT | None:
    """What a file of JSON holds; None if there is no file.

    Raises:
        ShardError: It is damaged.
    """
    try:
        return decode_json(path.read_bytes(), record_type)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardError(
            f"{path} is not a {record_type.__name__}: {error}",
            key=str(path),
            hint="restore the file from a backup of the run directory",
        ) from error


# Quarantine --------------------------------------------------------------------------------------


def record_quarantine(paths: RunPaths, record: UntrainedBatchPart) -> UntrainedBatchPart:
    """Set a batch aside, durably; what says so: the first one's record if somebody was first."""
    fault_point("quarantine.before_write")
    is_first = write_once(paths.quarantine(record.step), msgspec.json.encode(record))
    fault_point("quarantine.after_write")
    return (None if is_first else read_quarantine(paths, record.step)) or record


def delete_quarantine(paths: RunPaths, step: int) -> None:
    """Have a batch trained after all, durably."""
    paths.quarantine(step).unlink(missing_ok=True)
    fault_point("quarantine.after_delete")
    fsync_path(paths.quarantine_dir)


def read_quarantine(paths: RunPaths, step: int) -> UntrainedBatchPart | None:
    """Why the batch of `step` is quarantined; None if it is not."""
    return read_json_file(paths.quarantine(step), UntrainedBatchPart)


def read_quarantine_files(
    paths: RunPaths, problems: list[Problem] | None = None
) -> dict[int, UntrainedBatchPart]:
    """All files by step; `problems` takes what is wrong with those that cannot be read.

    Raises:
        ShardError: One is damaged, and nobody takes problems.
    """
    found = {}
    for step in list_batch_steps(paths.quarantine_dir):
        try:
            record = read_quarantine(paths, step)
        except ShardError as error:
            if problems is None:
                raise
            problems += error.problems
        else:
            if record is not None:  # else somebody deleted it just now
                found[step] = record
    return found


def merge_quarantines(
    state: TrainerState, files: Mapping[int, UntrainedBatchPart]
) -> dict[int, UntrainedBatchPart]:
    held = {one.step: one for one in state.untrained if one.quarantine}
    return held | {step: one for step, one in files.items() if step > state.step}


def read_quarantined_batches(paths: RunPaths) -> dict[int, UntrainedBatchPart]:
    """Quarantined batches by step, of the newest checkpoint and after it."""
    newest = find_latest_checkpoint(paths.checkpoints_dir)
    state = newest.state if newest else TrainerState(seed=0)
    return merge_quarantines(state, read_quarantine_files(paths))
