"""Checkpoint store: atomic directories, retention, asynchronous writes.

A checkpoint is everything that a restarted trainer needs, in one directory that appears whole.
`step_00000040/` holds a file of each rank, `index.json` (positions in these files), `trainer.json`,
and the marker `COMPLETE`. It is built under a hidden name while training continues: each rank
copies its part into host memory, and a thread writes it to disk. Rank 0 renames the directory once
all parts are durable, unless a newer trainer has taken over.

Random state needs no file: the order of data, and an adapter's dropout, are functions of `seed` and
`step`.
"""

import contextlib
import logging
import mmap
import os
import shutil
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from areal_hpc.errors import ArealError, ClusterError, SupersededTrainerError
from areal_hpc.jobs.processes.native_call_threads import start_native_call
from areal_hpc.jobs.starts import record_checkpoint_duration
from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.rundir.checkpoints import (
    CHECKPOINT_INDEX_FILE,
    COMPLETE_MARKER_FILE,
    DIGEST_BLOCK_BYTES,
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
    require_same_base,
    write_checkpoint_index,
    write_trainer_state,
)
from areal_hpc.rundir.files import fsync_path, make_folder, write_all
from areal_hpc.rundir.paths import format_step_dir
from areal_hpc.trainer.checkpoints.rank_state import (
    CRITIC_PREFIX,
    NetworkWithOptimizer,
    RankState,
    load_checkpoint_into,
)
from areal_hpc.trainer.collectives import (
    all_reduce_max,
    broadcast_object,
    gather_objects_on_first_rank,
    raise_on_all_ranks,
    read_with_retries_on_all_ranks,
)
from areal_hpc.trainer.model.policy import TrainedNetwork
from areal_hpc.trainer.optimizer import Optimizer, build_optimizer
from areal_hpc.trainer.private_apis.torch_private import pin_host_memory, unpin_host_memory
from areal_hpc.wire.fault_points import fault_point

logger = logging.getLogger(__name__)

POLL_S = 0.2
NICENESS = 5
REMOVAL_TIMEOUT_S = 60.0
"""Seconds that old checkpoints may still take to delete at the end of a run."""

WriteStatus = IntEnum("WriteStatus", "DONE PENDING FAILED")
"""Status of a rank's part of a checkpoint; the largest status of all ranks decides."""


class CheckpointStore:
    """Checkpoints of one training stage. At most one is being written at a time.

    Rank 0 calls `check_generation` before a checkpoint becomes visible; it raises when another
    trainer has replaced this one. `find_best_step` returns the step, if any, whose checkpoint is
    kept in addition to the last `keep`.
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
    ) -> tuple[Optimizer, Checkpoint | None]:
        """Build an optimizer, and load the latest checkpoint into it and the policy. A collective.

        `base` is the digest of the model that an adapter changes. A critic is loaded too, if the
        checkpoint has one. The checkpoint may come from another layout or other settings.
        """
        optimizer = build_optimizer(policy, config, is_offloaded=is_offloaded)
        if (checkpoint := self.broadcast_latest_checkpoint()) is not None:
            require_same_base(checkpoint, base)
            load_checkpoint_into(policy, optimizer, checkpoint.path, critic)
        return optimizer, checkpoint

    def broadcast_latest_checkpoint(self) -> Checkpoint | None:
        """Return rank 0's latest checkpoint, on every rank. A collective.

        Nodes may see a shared directory differently for some seconds: if each rank chose by itself,
        they could resume from different steps.
        """
        latest = find_latest_checkpoint(self._directory) if dist.get_rank() == 0 else None
        chosen = broadcast_object(
            (latest.path.name, latest.state) if latest else None, tuple[str, TrainerState] | None
        )
        if chosen is None:
            return None
        checkpoint = Checkpoint(self._directory / chosen[0], chosen[1])
        read_with_retries_on_all_ranks(
            lambda: _require_visible_checkpoint(checkpoint.path), ClusterError
        )
        return checkpoint

    def delete_leftovers(self, generation: int) -> None:
        """Delete remains of interrupted checkpoints. Rank 0 calls it before its first checkpoint.

        Checkpoints that a later generation is writing are left alone.
        """
        for path, written_by in list_unfinished_checkpoints(self._directory):
            if written_by is None or written_by <= generation:
                # Renamed first: an older trainer that hangs must not publish it half deleted.
                doomed = path.with_name(f".{format_step_dir(0)}.{uuid.uuid4().hex}")
                with contextlib.suppress(FileNotFoundError):  # its writer has just removed it
                    path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)  # its writer may be about to be killed

    # Writing ---------------------------------------------------------------------------------

    def begin_save(
        self,
        policy: TrainedNetwork,
        optimizer: Optimizer,
        state: TrainerState,
        critic: NetworkWithOptimizer | None = None,
    ) -> Path:
        """Finish an earlier save, copy the state, begin to write it and return its path.

        A collective.
        """
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
            rank_state = RankState(policy, optimizer, critic)
            rank_state.copy_to(self._writer.reserve_memory(rank_state.size_bytes, policy.device))
            fault_point("checkpoint.after_copy")
            small_files = _write_small_files(partial, rank_state, state)
            self._writer.begin_write(
                get_rank_file_path(partial, dist.get_rank()), rank_state.size_bytes, small_files
            )
            fault_point("checkpoint.while_writing")
        self._begun = Checkpoint(target, state)
        self._copied_s = time.monotonic() - began
        return target

    def poll_save(self, timeout_s: float = 0.0) -> bool:
        """Publish the checkpoint being written if all of it is on disk. A collective.

        Return True on every rank when this call made it visible and durable.
        """
        if self._begun is None:
            return False
        assert self._writer is not None
        failure: ArealError | None = None
        try:
            done = self._writer.poll_write(timeout_s)
            progress = WriteStatus.DONE if done else WriteStatus.PENDING
        except ClusterError as error:
            progress, failure = WriteStatus.FAILED, error
        slowest = all_reduce_max(progress)
        if slowest == WriteStatus.PENDING:
            return False
        if slowest == WriteStatus.DONE and dist.get_rank() == 0:
            try:
                self._publish_checkpoint(self._begun)
                record_checkpoint_duration(self._copied_s + self._writer.took_s)
            except ArealError as error:
                failure = error
        raise_on_all_ranks(failure)
        self._begun = None
        return True

    def finish_save(self) -> bool:
        """Wait for the checkpoint being written; return False if there is none. A collective."""
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
            checkpoints = list_checkpoints(self._directory)
            best = self._find_best_step([item.state.step for item in checkpoints])
            for old in checkpoints[: -self._keep]:
                if old.state.step == best:
                    continue
                # Hidden first: a half-deleted checkpoint must not look complete.
                doomed = old.path.with_name(f".{old.path.name}.old")
                old.path.rename(doomed)
                if self._writer is not None:
                    self._writer.begin_remove_directory(doomed)
        fault_point("checkpoint.after_write")

    def _rename_into_place(self, partial: Path, checkpoint: Checkpoint) -> None:
        target, current = checkpoint.path, checkpoint.state.generation
        if target.exists():  # written by an abandoned generation, or by one that replaced this one
            generation = (
                read_trainer_state(target).generation if is_complete_checkpoint(target) else -1
            )
            if generation > current:
                raise SupersededTrainerError(
                    f"generation {generation} has saved {target.name} before generation {current}"
                )
            replaced = target.with_name(f".{target.name}.replaced")
            target.rename(replaced)
            partial.rename(target)
            shutil.rmtree(replaced)
        else:
            partial.rename(target)


def _write_small_files(partial: Path, rank_state: RankState, state: TrainerState) -> list[str]:
    """Gather all ranks' indices; rank 0 writes them and the state, and returns the file names.

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


class CheckpointWriter:
    """Background writer of one copy of a rank's state at a time; it also deletes directories.

    The copies of all ranks take 14 bytes per parameter in bfloat16, 12 in float32. Their memory is
    as large as the largest copy so far, from the first checkpoint to the end of the run. Copies,
    checksums and system calls release the interpreter lock.
    """

    def __init__(self) -> None:
        self.took_s = 0.0
        """Seconds that writing the last file took."""
        self._memory: torch.Tensor | None = None
        self._is_pinned = False
        self._path = Path()
        self._writing: Future[float] | None = None
        self._removals: list[Future[None]] = []

    def reserve_memory(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return memory for the next copy, pinned for a GPU; unchanged while it is written."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._release_memory()
            # All pages at once: else each causes a page fault in the first checkpoint's copy.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            mapped = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=flags)
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
            if device.type == "cuda":
                pin_host_memory(self._memory)
                self._is_pinned = True
        return self._memory

    def _release_memory(self) -> None:
        if self._memory is not None and self._is_pinned:
            unpin_host_memory(self._memory)
        self._memory, self._is_pinned = None, False

    def begin_write(self, path: Path, size_bytes: int, files_to_sync: Sequence[str]) -> None:
        """Begin to write the first bytes of the memory into a new file.

        Files beside it with the names `files_to_sync` become durable with it.
        """
        assert self._memory is not None
        content = self._memory[:size_bytes].numpy().data
        self._path = path
        self._writing = start_native_call(
            lambda: _write_durably(content, path, files_to_sync), "checkpoint-writer"
        )

    def poll_write(self, timeout_s: float) -> bool:
        """Return whether the file, its neighbors and their directory are on disk."""
        if self._writing is None:
            return True
        wait([self._writing], timeout_s)
        if not self._writing.done():
            return False
        try:
            self.took_s = self._writing.result()
        except OSError as error:
            raise build_checkpoint_write_error(self._path, error) from error
        logger.debug("%s took %.1f s", self._path, self.took_s)
        self._writing = None
        return True

    def begin_remove_directory(self, directory: Path) -> None:
        def remove() -> None:
            shutil.rmtree(directory, ignore_errors=True)

        running = [removal for removal in self._removals if not removal.done()]
        self._removals = [*running, start_native_call(remove, "checkpoint-removal")]

    def close(self) -> None:
        """Wait for deletions, and release the memory."""
        if wait(self._removals, REMOVAL_TIMEOUT_S).not_done:
            logger.warning("left an old checkpoint: deleting took over %.0f s", REMOVAL_TIMEOUT_S)
        self._release_memory()


def _write_durably(content: memoryview, path: Path, files_to_sync: Sequence[str]) -> float:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # only this thread
    began = time.perf_counter()
    fault_point("checkpoint.before_write")
    write_rank_file(content, path)
    for name in files_to_sync:
        fsync_path(path.parent / name)
    fsync_path(path.parent)
    return time.perf_counter() - began


def write_rank_file(content: memoryview, path: Path) -> None:
    """Write bytes, then the digests of their blocks, and force both to disk."""
    with path.open("wb", buffering=0) as file:
        digests = []
        for start in range(0, len(content), DIGEST_BLOCK_BYTES):
            block = content[start : start + DIGEST_BLOCK_BYTES]
            digests.append(zlib.crc32(block))
            write_all(file.fileno(), [block])
        fault_point("checkpoint.before_digests")
        write_all(file.fileno(), [struct.pack(f"<{len(digests)}I", *digests)])
        os.fsync(file.fileno())
