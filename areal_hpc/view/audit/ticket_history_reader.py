"""Reader of the files that tell what happened to each ticket."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.errors import Problem, ShardError
from areal_hpc.rundir.checkpoints import TrainerState, UntrainedBatchPart, list_checkpoints
from areal_hpc.rundir.manifests import (
    list_manifest_steps,
    read_drops,
    read_manifest,
    read_quarantine_files,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import read_run_recipe
from areal_hpc.shards.index import SealedShard, read_index
from areal_hpc.wire.ledger import BatchManifest

NO_CHECKPOINT = TrainerState(step=0, generation=0, seed=0)


@dataclass(frozen=True, slots=True)
class TicketRecordsOfRun:
    checkpoint: TrainerState = NO_CHECKPOINT
    """The newest; of step 0 when there is none."""
    manifests: Mapping[int, BatchManifest] = field(default_factory=dict)
    drops: Mapping[int, str] = field(default_factory=dict)
    """Ticket id -> reason, of tickets given up on."""
    filtered: Mapping[int, str] = field(default_factory=dict)
    """Ticket id -> reason, of tickets whose group was not accepted."""
    quarantine_request_by_step: Mapping[int, UntrainedBatchPart] = field(default_factory=dict)
    shards: Sequence[SealedShard] = ()
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    is_finished: bool = False
    total_steps: int = 0
    batch_size: int = 0
    """0 when no recipe says it."""
    max_head_offpolicyness: int = 0
    problems: Sequence[Problem] = ()


def read_ticket_records(paths: RunPaths) -> TicketRecordsOfRun:
    """Read against the flow of a ticket, so that in a live run no later trace lacks an earlier."""
    problems: list[Problem] = []
    is_finished = paths.finished_marker.exists()
    checkpoint = _find_newest_checkpoint(paths.checkpoints_dir, problems)
    quarantined = read_quarantine_files(paths, problems)
    manifests = dict(_iterate_readable_manifests(paths, problems))
    drops: dict[int, str] = {}
    filtered: dict[int, str] = {}
    for drop in read_drops(paths):
        reasons = filtered if drop.kind == "filtered" else drops
        reasons.setdefault(drop.ref.ticket_id, drop.reason)
    shards = read_index(paths.shard_index_dir)
    batch_size, offpolicyness, total_steps = _read_recipe_limits(paths)
    return TicketRecordsOfRun(
        checkpoint,
        manifests,
        drops,
        filtered,
        quarantined,
        shards,
        dict(_list_file_sizes(paths.shards_dir)),
        is_finished,
        total_steps,
        batch_size,
        offpolicyness,
        problems,
    )


def _list_file_sizes(directory: Path) -> Iterator[tuple[str, int]]:
    for path in directory.iterdir() if directory.is_dir() else ():
        with suppress(FileNotFoundError):  # got its final name just now; the index has it by then
            yield path.name, path.stat().st_size


def _find_newest_checkpoint(directory: Path, problems: list[Problem]) -> TrainerState:
    found = list_checkpoints(directory, problems)
    newest = found[-1].state if found else NO_CHECKPOINT
    if sorted(newest.consumed) != list(range(1, newest.step + 1)):
        message = (
            f"the checkpoint of step {newest.step} consumed batches {newest.consumed}; "
            f"expected each of 1 to {newest.step} exactly once"
        )
        problems.append(Problem(message, str(directory)))
    return newest


def _iterate_readable_manifests(
    paths: RunPaths, problems: list[Problem]
) -> Iterator[tuple[int, BatchManifest]]:
    for step in list_manifest_steps(paths):
        try:
            manifest = read_manifest(paths, step)
        except ShardError as error:
            problems += error.problems
            continue
        if manifest.step != step:
            message = f"expected the batch of step {step}, got {manifest.step}"
            problems.append(Problem(message, str(paths.manifest(step))))
        yield step, manifest


def _read_recipe_limits(paths: RunPaths) -> tuple[int, int, int]:
    """Batch size, and the largest off-policyness and the steps that any launch asked for.

    Recipes are read as plain YAML: an old run must be auditable by newer code.
    """
    batch_size = offpolicyness = total_steps = 0
    for path in paths.list_recipe_files():
        recipe = read_run_recipe(path)
        trainer, rollout = recipe["trainer"], recipe.get("rollout") or {}
        batch_size = max(batch_size, trainer.get("batch_size", 0))
        offpolicyness = max(offpolicyness, rollout.get("max_head_offpolicyness", 0))
        if path == paths.recipe:
            total_steps = trainer.get("total_steps", 0)
    return batch_size, offpolicyness, total_steps
