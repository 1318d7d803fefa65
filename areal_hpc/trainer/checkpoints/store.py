"""Checkpoint store: atomic directories, retention, asynchronous writes.

A checkpoint is everything a restarted trainer needs, in one directory that appears whole.
`step_00000040/` holds a file of each rank, `index.json` (what is where in it), `trainer.json`, and
the marker `COMPLETE`. It is built under a hidden name while training goes on: each rank copies its
part into host memory, from which a thread puts it on disk. Rank 0 renames the directory once every
rank's part is there and no newer trainer has taken over.

Random state needs no file: the order of data, and an adapter's dropout, are functions of `seed` and
`step`.
"""

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from areal_hpc.errors import ArealError, ClusterError, SupersededTrainerError
from areal_hpc.jobs.starts import record_checkpoint_duration
from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.rundir.checkpoints import (
    CHECKPOINT_INDEX_FILE,
    COMPLETE_MARKER_FILE,
    TRAINER_STATE_FILE,
    Checkpoint,
    RankIndex,
    TrainerState,
    build_checkpoint_write_error,
    find_latest_checkpoint,
    get_rank_file_path,
    get_unfinished_checkpoint_path,
    is_complete_checkpoint,
    list_checkpoints,
    list_unfinished_checkpoints,
    merge_rank_indices,
    read_trainer_state,
    write_checkpoint_index,
    write_trainer_state,
)
from areal_hpc.rundir.files import fsync_path, make_folder
from areal_hpc.rundir.paths import format_step_dir
from areal_hpc.trainer.checkpoints.frozen_base import require_same_base
from areal_hpc.trainer.checkpoints.rank_state import (
    CRITIC_PREFIX,
    NetworkWithOptimizer,
    RankState,
    load_checkpoint_into,
)
from areal_hpc.trainer.checkpoints.writer import CheckpointWriter
from areal_hpc.trainer.collectives import (
    all_reduce_max,
    broadcast_object,
    gather_objects_on_first_rank,
    raise_on_all_ranks,
    read_with_retries_on_all_ranks,
)
from areal_hpc.trainer.model.policy import TrainedNetwork
from areal_hpc.trainer.optimizer import build_optimizer
from areal_hpc.wire.fault_points import fault_point

POLL_S = 0.2

WriteStatus = IntEnum("WriteStatus", "DONE PENDING FAILED")
"""How far a rank's part of a checkpoint is; the largest of all ranks decides."""


class CheckpointStore:
    """The checkpoints of one training stage. One may be in the writing at a time.

    `check_generation` is called on rank 0 before a checkpoint becomes visible; it raises when this
    trainer has been replaced. `find_best_step` names the one of some steps whose checkpoint is kept
    beside the last `keep`, if any.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        check_generation: Callable[[], None] = lambda: None,
        find_best_step: Callable[[Sequence[int]], int | None] = lambda steps: None,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._check_generation = check_generation
        self._find_best_step = find_best_step
        self._writer: CheckpointWriter | None = None
        self._begun: Checkpoint | None = None
        self._copied_s = 0.0

    # Reading ---------------------------------------------------------------------------------

    def restore_latest(
        self,
        policy: TrainedNetwork,
        config: AdamConfig,
        *,
        is_offloaded: bool = False,
        critic: NetworkWithOptimizer | None = None,
        base: str = "",
    ) -> tuple[Any, Checkpoint | None]:
        """An optimizer for the policy, and the latest checkpoint, loaded into both. A collective.

        `base` is the digest of the model that an adapter changes.
        A critic is loaded too, if the checkpoint has one.
        The checkpoint may be of another layout, and of a run with other settings than those given.
        """
        optimizer = build_optimizer(policy, config, is_offloaded=is_offloaded)
        if (checkpoint := self.broadcast_latest_checkpoint()) is not None:
            require_same_base(checkpoint, base)
            load_checkpoint_into(policy, optimizer, checkpoint.path, critic)
        return optimizer, checkpoint

    def broadcast_latest_checkpoint(self) -> Checkpoint | None:
        """Rank 0's latest checkpoint, on every rank. A collective.

        Nodes may see a shared directory differently for some seconds: had each rank its own
        choice, they could resume from different steps.
        """
        found = find_latest_checkpoint(self._directory) if dist.get_rank() == 0 else None
        chosen = broadcast_object(
            (found.path.name, found.state) if found else None, tuple[str, TrainerState] | None
        )
        if chosen is None:
            return None
        checkpoint = Checkpoint(self._directory / chosen[0], chosen[1])
        read_with_retries_on_all_ranks(
            lambda: _require_visible_checkpoint(checkpoint.path), ClusterError
        )
        return checkpoint

    def delete_leftovers(self, generation: int) -> None:
        """Delete what interrupted checkpoints left behind. For rank 0, before its first one.

        What a generation later than this trainer's is writing is not ours to touch.
        """
        for path, written_by in list_unfinished_checkpoints(self._directory):
            if written_by is None or written_by <= generation:
                # Renamed first: an older trainer that is stuck must not make it visible half gone.
                doomed = path.with_name(f".{format_step_dir(0)}.{uuid.uuid4().hex}")
                with contextlib.suppress(FileNotFoundError):  # its writer has just removed it
                    path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)  # its writer may be about to be killed

    # Writing ---------------------------------------------------------------------------------

    def begin_save(
        self,
        policy: TrainedNetwork,
        optimizer: Any,
        state: TrainerState,
        critic: NetworkWithOptimizer | None = None,
    ) -> Path:
        """Copy the state and begin to write it, after an earlier one; its path. A collective."""
        self.finish_save()
        began = time.monotonic()
        target = self._directory / format_step_dir(state.step)
        partial = get_unfinished_checkpoint_path(self._directory, state.step, state.generation)
        is_first = dist.get_rank() == 0
        with _convert_storage_errors(partial):
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
                make_folder(partial)
            dist.barrier()
            self._writer = self._writer or CheckpointWriter()
            fault_point("checkpoint.before_copy")
            held = RankState(policy, optimizer, critic)
            held.copy_to(self._writer.reserve_memory(held.size_bytes, policy.device))
            fault_point("checkpoint.after_copy")
            small = _write_small_files(partial, held, state)
            self._writer.begin_write(
                get_rank_file_path(partial, dist.get_rank()), held.size_bytes, small
            )
            fault_point("checkpoint.while_writing")
        self._begun = Checkpoint(target, state)
        self._copied_s = time.monotonic() - began
        return target

    def poll_save(self, timeout_s: float = 0.0) -> bool:
        """Make the checkpoint being written visible if all of it is on disk. A collective.

        True on every rank when it became visible and durable in this call.
        """
        if self._begun is None:
            return False
        assert self._writer is not None
        trouble: ArealError | None = None
        try:
            done = self._writer.poll_write(timeout_s)
            progress = WriteStatus.DONE if done else WriteStatus.PENDING
        except ClusterError as error:
            progress, trouble = WriteStatus.FAILED, error
        slowest = all_reduce_max(progress)
        if slowest == WriteStatus.PENDING:
            return False
        if slowest == WriteStatus.DONE and dist.get_rank() == 0:
            try:
                self._publish_checkpoint(self._begun)
                record_checkpoint_duration(self._copied_s + self._writer.took_s)
            except ArealError as error:
                trouble = error
        raise_on_all_ranks(trouble)
        self._begun = None
        return True

    def finish_save(self) -> bool:
        """Wait for the checkpoint being written; false when there was none. A collective."""
        if self._begun is None:
            return False
        while not self.poll_save(POLL_S):
            pass
        return True

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _publish_checkpoint(self, checkpoint: Checkpoint) -> None:
        partial = get_unfinished_checkpoint_path(
            self._directory, checkpoint.state.step, checkpoint.state.generation
        )
        fault_point("checkpoint.before_marker")
        with _convert_storage_errors(partial):
            (partial / COMPLETE_MARKER_FILE).touch()
            fsync_path(partial / COMPLETE_MARKER_FILE)
            fsync_path(partial)
            self._check_generation()
            fault_point("checkpoint.before_rename")
            self._rename_into_place(partial, checkpoint)
            fault_point("checkpoint.after_rename")
            fsync_path(self._directory)
            found = list_checkpoints(self._directory)
            best = self._find_best_step([one.state.step for one in found])
            for old in found[: -self._keep]:
                if old.state.step == best:
                    continue
                # Hidden first: a half-deleted checkpoint must not look complete.
                doomed = old.path.with_name(f".{old.path.name}.old")
                old.path.rename(doomed)
                if self._writer is not None:
                    self._writer.begin_remove_directory(doomed)
        fault_point("checkpoint.after_write")

    def _rename_into_place(self, partial: Path, checkpoint: Checkpoint) -> None:
        target, own = checkpoint.path, checkpoint.state.generation
        if target.exists():  # of an abandoned generation, or of the one that replaced this
            generation = (
                read_trainer_state(target).generation if is_complete_checkpoint(target) else -1
            )
            if generation > own:
                raise SupersededTrainerError(
                    f"generation {generation} has saved {target.name} before generation {own}"
                )
            replaced = target.with_name(f".{target.name}.replaced")
            target.rename(replaced)
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)


def _write_small_files(partial: Path, rank_state: RankState, state: TrainerState) -> list[str]:
    """Gather all ranks' indices; rank 0 writes them and the state, and returns the names of files.

    A collective.
    """
    steps = rank_state.read_optimizer_steps_over_all_ranks()
    parts = gather_objects_on_first_rank(rank_state.build_index(dist.get_rank()), RankIndex)
    if not parts:
        return []
    index = merge_rank_indices(parts, rank_state.types, steps[""], steps.get(CRITIC_PREFIX, 0))
    write_checkpoint_index(partial, index)
    write_trainer_state(partial, state)
    return [CHECKPOINT_INDEX_FILE, TRAINER_STATE_FILE]


def _require_visible_checkpoint(path: Path) -> None:
    if not is_complete_checkpoint(path):
        raise ClusterError(
            "rank 0 resumes from a checkpoint that this rank cannot see",
            key=str(path),
            hint="check that every node mounts the run directory",
        )


@contextmanager
def _convert_storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise build_checkpoint_write_error(path, error) from error
