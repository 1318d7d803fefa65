"""Writer of a rank's part of a checkpoint: a copy of it in host memory, put on disk by a thread."""

import logging
import mmap
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import torch

from areal_hpc.jobs.processes.native_call_threads import start_native_call
from areal_hpc.rundir.checkpoints import DIGEST_BLOCK_BYTES, build_checkpoint_write_error
from areal_hpc.rundir.files import fsync_path
from areal_hpc.shards.disk_io import write_all
from areal_hpc.trainer.private_apis.torch_private import pin_host_memory, unpin_host_memory
from areal_hpc.wire.fault_points import fault_point

logger = logging.getLogger(__name__)

NICENESS = 5
REMOVAL_TIMEOUT_S = 60.0
"""Time that old checkpoints may still take to delete at the end of a run."""


class CheckpointWriter:
    """Writes one copy of a rank's state at a time, and deletes old checkpoints, beside training.

    The copies of all ranks take 14 bytes a parameter in bfloat16, 12 in float32. The memory for
    them is as large as the largest copy so far, from the first checkpoint to the end of the run.
    Copying, checksums and calls of the system release the interpreter's lock.
    """

    def __init__(self) -> None:
        self.took_s = 0.0
        """Seconds that the last file took to write."""
        self._memory: torch.Tensor | None = None
        self._is_pinned = False
        self._path = Path()
        self._writing: Future[float] | None = None
        self._removals: list[Future[None]] = []

    def reserve_memory(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes for the next copy, pinned if it comes from a GPU; unchanged while it is written."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._release_memory()
            # All pages at once: else each costs a trap, in the first checkpoint's copy.
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
        work = partial(_write_and_sync, content, path, files_to_sync)
        self._path, self._writing = path, start_native_call(work, "checkpoint-writer")

    def poll_write(self, timeout_s: float) -> bool:
        """True once the file, its neighbors and their directory are on disk."""
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
        remove = partial(shutil.rmtree, directory, ignore_errors=True)
        running = [one for one in self._removals if not one.done()]
        self._removals = [*running, start_native_call(remove, "checkpoint-removal")]

    def close(self) -> None:
        """Wait for deletions, and give the memory back."""
        if wait(self._removals, REMOVAL_TIMEOUT_S).not_done:
            logger.warning("left an old checkpoint: deleting took over %.0f s", REMOVAL_TIMEOUT_S)
        self._release_memory()


def _write_and_sync(content: memoryview, path: Path, files_to_sync: Sequence[str]) -> float:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread
    began = time.perf_counter()
    fault_point("checkpoint.before_write")
    write_rank_file(content, path)
    for name in files_to_sync:
        fsync_path(path.parent / name)
    fsync_path(path.parent)
    return time.perf_counter() - began


def write_rank_file(content: memoryview, path: Path) -> None:
    """Write bytes, and behind them the digests of their blocks. Forced to disk."""
    with path.open("wb", buffering=0) as file:
        digests = []
        for start in range(0, len(content), DIGEST_BLOCK_BYTES):
            block = content[start : start + DIGEST_BLOCK_BYTES]
            digests.append(zlib.crc32(block))
            write_all(file.fileno(), [block])
        fault_point("checkpoint.before_digests")
        write_all(file.fileno(), [struct.pack(f"<{len(digests)}I", *digests)])
        os.fsync(file.fileno())
