"""Files of the ledger: batch manifests, dropped tickets, evaluation results, its own state.

A quarantined batch is consumed like any other, but not trained. A file in `quarantine/` takes
effect when its batch is issued, so it applies to batches that no checkpoint has consumed yet. A
checkpoint records which of its consumed batches were trained.
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
    """Newest generation that a trainer opened."""
    version_step: int = 0
    """Last step that this trainer published or resumed from."""
    forks: tuple[GenerationFork, ...] = ()
    """Every generation opened so far, with its first step."""

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
    """Mean reward over the samples of each task, by task index."""
    failures: dict[int, str]
    """Reasons, by task index, of episodes that could not run; they count as reward 0."""
    generation: int
    """Generation of the evaluated weights."""
    samples: list[list[float]] = []
    """Rewards of the samples of each task, by task index; empty if each task has one sample."""
    answers: list[list[str]] = []
    """Answers of the samples of each task, by task index; empty if there are none."""

    def list_sample_rewards(self) -> list[list[float]]:
        return self.samples or [[reward] for reward in self.rewards]


class EvaluatedTicket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Finished task of an evaluation under way, which is not played again."""

    ticket_id: int
    generation: int
    """Generation of the evaluated weights."""
    rewards: list[float]
    """Reward of each sample."""
    answers: list[str] = []
    """Answer of each sample; empty if there are none."""


class DroppedTicket(msgspec.Struct, frozen=True):
    """Line of `dropped_tickets.jsonl`: a ticket that is finally not trained, and the reason."""

    ref: TicketRef
    reason: str
    kind: DropKind = "failed"
    rewards: list[float] = []
    """Rewards of the episodes of a `filtered` group."""


def write_manifest(paths: RunPaths, manifest: BatchManifest) -> BatchManifest:
    """Make a batch durable before it is issued.

    A manifest is never replaced, because checkpoints name batches by their step alone.

    Returns:
        The batch of that step, which is another ledger's if that ledger was first.
    """
    is_first = write_once(paths.manifest(manifest.step), msgspec.json.encode(manifest))
    return manifest if is_first else read_manifest(paths, manifest.step)


def read_manifest(paths: RunPaths, step: int) -> BatchManifest:
    """Read the batch of `step` exactly as it was issued.

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
    """Read every issued batch in the order of steps, without files that a crash left."""
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
    """Read a set's result for weights of `step` that the run still has; None without one."""
    result = read_evaluation(paths, step, set_name)
    if result is None or read_ledger_state(paths).has_kept_weights(step, result.generation):
        return result
    return None


def append_evaluated_ticket(paths: RunPaths, step: int, ticket: EvaluatedTicket) -> None:
    """Append the rewards of one task without fsync: a lost node costs its last tasks."""
    paths.evaluations_dir.mkdir(exist_ok=True)
    append_line(paths.evaluated_tickets(step), ticket)


def read_evaluated_tickets(paths: RunPaths, step: int) -> list[EvaluatedTicket]:
    return read_readable_records(paths.evaluated_tickets(step), EvaluatedTicket)


def replace_evaluated_tickets(
    paths: RunPaths, step: int, tickets: Sequence[EvaluatedTicket]
) -> None:
    """Keep only these tasks of an evaluation; remove the file if there are none."""
    if tickets:
        replace_lines(paths.evaluated_tickets(step), tickets)
    else:
        paths.evaluated_tickets(step).unlink(missing_ok=True)


def list_kept_evaluations(paths: RunPaths, main_set: str) -> Iterator[tuple[str, EvaluationResult]]:
    """Iterate over results with their sets' names, by set and step; `main_set` comes first.

    Results of weights that a resumed trainer discarded are left out.
    """
    state, folder = read_ledger_state(paths), paths.evaluations_dir
    folders = folder.iterdir() if folder.is_dir() else ()
    names = sorted(set_dir.name for set_dir in folders if set_dir.is_dir())
    for name in (main_set, *names):
        for file in sorted(paths.evaluation(0, name).parent.glob("*.json")):
            result = read_json_file(file, EvaluationResult)
            if result and state.has_kept_weights(result.step, result.generation):
                yield name, result


def group_kept_evaluations(
    paths: RunPaths, main_set: str, problems: list[str]
) -> dict[str, list[EvaluationResult]]:
    """Group results by set, up to the first damaged one, which is added to `problems`."""
    results: dict[str, list[EvaluationResult]] = {}
    try:
        for name, result in list_kept_evaluations(paths, main_set):
            results.setdefault(name, []).append(result)
    except ShardError as error:
        problems.append(str(error))
    return results


def append_drop(paths: RunPaths, dropped_ticket: DroppedTicket) -> None:
    """Make a drop durable. A repetition is harmless: the first line of a ticket counts."""
    append_line(paths.drops, dropped_ticket, sync=True)


def read_drops(paths: RunPaths) -> list[DroppedTicket]:
    return read_readable_records(paths.drops, DroppedTicket)


def read_json_file(path: Path, record_type: type[RecordT]) -> RecordT | None:
    """Decode a JSON file; None if there is no file.

    Raises:
        ShardError: The file is damaged.
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
    """Quarantine a batch durably; return the record that counts, an earlier one if there is one."""
    fault_point("quarantine.before_write")
    is_first = write_once(paths.quarantine(record.step), msgspec.json.encode(record))
    fault_point("quarantine.after_write")
    return (None if is_first else read_quarantine(paths, record.step)) or record


def delete_quarantine(paths: RunPaths, step: int) -> None:
    """Release a batch from quarantine, durably."""
    paths.quarantine(step).unlink(missing_ok=True)
    fault_point("quarantine.after_delete")
    fsync_path(paths.quarantine_dir)


def read_quarantine(paths: RunPaths, step: int) -> UntrainedBatchPart | None:
    """Read the quarantine record of a step's batch; None if it is not quarantined."""
    return read_json_file(paths.quarantine(step), UntrainedBatchPart)


def read_quarantine_files(
    paths: RunPaths, problems: list[Problem] | None = None
) -> dict[int, UntrainedBatchPart]:
    """Read all records by step; problems of files that cannot be read are added to `problems`.

    Raises:
        ShardError: A file is damaged, and `problems` is None.
    """
    records = {}
    for step in list_batch_steps(paths.quarantine_dir):
        try:
            record = read_quarantine(paths, step)
        except ShardError as error:
            if problems is None:
                raise
            problems += error.problems
        else:
            if record is not None:  # else it was deleted just now
                records[step] = record
    return records


def merge_quarantines(
    state: TrainerState, files: Mapping[int, UntrainedBatchPart]
) -> dict[int, UntrainedBatchPart]:
    consumed = {part.step: part for part in state.untrained if part.quarantine}
    return consumed | {step: part for step, part in files.items() if step > state.step}


def read_quarantined_batches(paths: RunPaths) -> dict[int, UntrainedBatchPart]:
    """Read the quarantined batches of the newest checkpoint and after it, by step."""
    newest = find_latest_checkpoint(paths.checkpoints_dir)
    state = newest.state if newest else TrainerState(seed=0)
    return merge_quarantines(state, read_quarantine_files(paths))
